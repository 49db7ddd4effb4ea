// A device "sim" of torch's kind PrivateUse1. It computes on the CPU at once, and pretends to be
// late: each kernel takes time on its stream, which passes when somebody waits for the stream, and
// a copy to main memory that does not block arrives only then.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <map>
#include <mutex>
#include <set>

namespace {

constexpr auto SIM = c10::DeviceType::PrivateUse1;
const c10::Device HERE(SIM, 0);
using Ints = c10::IntArrayRef;

// ---- time -------------------------------------------------------------------------------------

struct Copy {
  double due_s;
  std::function<void()> arrive;
};

std::mutex lock;
double passed_s = 0, kernel_s = 1e-6;
std::map<c10::StreamId, double> due_s;  // when each stream will have finished
std::vector<Copy> copies;
py::object* nap = nullptr;
thread_local c10::StreamId stream = 0;
thread_local bool is_inside = false;  // of a kernel, whose own copies are no work of the device

void launch() {
  std::lock_guard<std::mutex> locked(lock);
  due_s[stream] = std::max(due_s[stream], passed_s) + kernel_s;
}

void wait_until(double moment_s) {
  std::vector<Copy> arrived;
  double wait_s;
  {
    std::lock_guard<std::mutex> locked(lock);
    wait_s = moment_s - passed_s;
    passed_s = std::max(passed_s, moment_s);
    auto later = std::stable_partition(
        copies.begin(), copies.end(), [](const Copy& copy) { return copy.due_s > passed_s; });
    arrived.assign(later, copies.end());
    copies.erase(later, copies.end());
  }
  if (wait_s > 0) {
    py::gil_scoped_acquire held;
    (*nap)(wait_s);
  }
  for (auto& copy : arrived) copy.arrive();
}

double finished_s(std::optional<c10::StreamId> only = std::nullopt) {
  std::lock_guard<std::mutex> locked(lock);
  double last_s = 0;
  for (auto& [id, moment_s] : due_s)
    if (!only || id == *only) last_s = std::max(last_s, moment_s);
  return last_s;
}

void synchronize() { wait_until(finished_s()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SIM; }
  c10::Device exchangeDevice(c10::Device) const override { return HERE; }
  c10::Device getDevice() const override { return HERE; }
  void setDevice(c10::Device device) const override { TORCH_CHECK(device.index() < 1, "no sim:1"); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, HERE, stream);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, HERE);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    static std::atomic<c10::StreamId> made{0};
    return c10::Stream(c10::Stream::UNSAFE, HERE, ++made);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return c10::Stream(c10::Stream::UNSAFE, HERE, std::exchange(stream, next.id()));
  }
  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new double;
    *static_cast<double*>(*event) = std::max(finished_s(on.id()), passed_s);
  }
  void block(void* event, const c10::Stream& on) const override {
    std::lock_guard<std::mutex> locked(lock);
    due_s[on.id()] = std::max(due_s[on.id()], *static_cast<double*>(event));
  }
  bool queryEvent(void* event) const override {
    return !event || *static_cast<double*>(event) <= passed_s;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<double*>(event);
  }
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    return 1e3 * (*static_cast<double*>(end) - *static_cast<double*>(start));
  }
  void synchronizeEvent(void* event) const override { wait_until(*static_cast<double*>(event)); }
  bool queryStream(const c10::Stream& one) const override { return finished_s(one.id()) <= passed_s; }
  void synchronizeStream(const c10::Stream& one) const override { wait_until(finished_s(one.id())); }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- memory -----------------------------------------------------------------------------------

int64_t allocated = 0, peak = 0, reserved = 0, limit = int64_t(1) << 30;

void give_back(void* block) {
  if (!block) return;
  std::lock_guard<std::mutex> locked(lock);
  auto* start = static_cast<int64_t*>(block);
  allocated -= *start;
  free(start);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    int64_t size = bytes;
    std::lock_guard<std::mutex> locked(lock);
    TORCH_CHECK_WITH(OutOfMemoryError, allocated + size <= limit, "SIM out of memory. Tried to allocate ",
                     size, " bytes of ", limit, ", ", allocated, " are taken.");
    allocated += size;
    peak = std::max(peak, allocated);
    reserved = std::max(reserved, allocated);
    void* block = nullptr;
    TORCH_CHECK(!posix_memalign(&block, 64, size + 64));
    *static_cast<int64_t*>(block) = size;  // the block's head; what the tensor sees comes after
    return {static_cast<char*>(block) + 64, block, &give_back, HERE};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} memory;
REGISTER_ALLOCATOR(SIM, &memory);

std::set<const void*> pinned;

void unpin(void* block) {
  std::lock_guard<std::mutex> locked(lock);
  pinned.erase(block);
  free(block);
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* block = malloc(std::max<size_t>(bytes, 1));
    std::lock_guard<std::mutex> locked(lock);
    pinned.insert(block);
    return {block, block, &unpin, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} pinning;

// ---- random numbers ---------------------------------------------------------------------------

struct SimGenerator final : at::CPUGeneratorImpl {
  SimGenerator() {
    device_ = HERE;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

at::Generator& generator() {
  static auto* one = new at::Generator(at::make_generator<SimGenerator>());
  return *one;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<SimGenerator>();
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinning; }
  bool isPinnedPtr(const void* block) const override {
    std::lock_guard<std::mutex> locked(lock);
    return pinned.count(block) > 0;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), size);
  }
};

// ---- kernels ----------------------------------------------------------------------------------

at::Tensor on_cpu(const at::Tensor& tensor) {  // the same memory, as the CPU sees it
  if (!tensor.defined() || tensor.is_cpu()) return tensor;
  auto seen = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {},
                            tensor.options().device(c10::kCPU));
  seen._set_conj(tensor.is_conj());
  seen._set_neg(tensor.is_neg());
  return seen;
}

struct Inside {
  bool outer = std::exchange(is_inside, true);
  ~Inside() { is_inside = outer; }
};

// Runs any operator on the CPU, random ones with the device's numbers in place of the CPU's.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  launch();
  Inside inside;
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return at::native::cpu_fallback(op, stack);
  auto own = generator(), cpu = at::detail::getDefaultCPUGenerator();
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& given = (*stack)[stack->size() - arguments.size() + i];
    if (arguments[i].name() != "generator" || given.isNone()) continue;
    own = given.toGenerator();
    TORCH_CHECK(own.device().type() == SIM, "Expected a generator of sim, found ", own.device());
    given = c10::IValue();
  }
  auto before = cpu.get_state();
  cpu.set_state(own.get_state());
  at::native::cpu_fallback(op, stack);
  own.set_state(cpu.get_state());
  cpu.set_state(before);
}

at::Tensor empty(Ints size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(Ints size, Ints stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (is_inside) {
    on_cpu(to).copy_(on_cpu(self));
    return to;
  }
  launch();
  if (to.is_cpu() && non_blocking) {
    std::lock_guard<std::mutex> locked(lock);
    copies.push_back({due_s[stream], [to, now = on_cpu(self).clone()] { to.copy_(now); }});
    return to;
  }
  on_cpu(to).copy_(on_cpu(self));
  if (to.is_cpu() || self.is_cpu()) wait_until(finished_s(stream));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar item(const at::Tensor& self) {
  launch();
  if (!is_inside) wait_until(finished_s(stream));
  return on_cpu(self).item();
}

at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       Ints stride, Ints padding, Ints dilation, bool transposed, Ints added, int64_t groups) {
  launch();
  auto b = bias ? std::optional<at::Tensor>(on_cpu(*bias)) : std::nullopt;
  return at::convolution(on_cpu(x), on_cpu(weight), b, stride, padding, dilation, transposed, added, groups)
      .to(HERE);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight, Ints stride, Ints padding,
    Ints dilation, bool transposed, Ints added, int64_t groups, std::array<bool, 3> wanted) {
  launch();
  auto [gx, gw, gb] = at::convolution_backward(
      on_cpu(gradient), on_cpu(x), on_cpu(weight), at::IntArrayRef(weight.size(transposed ? 1 : 0)), stride,
      padding, dilation, transposed, added, groups, wanted);
  auto there = [](const at::Tensor& t) { return t.defined() ? t.to(HERE) : t; };
  return {there(gx), there(gw), there(gb)};
}

int64_t attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                  double, bool, std::optional<double>, bool) {
  return 0;  // SDPBackend.MATH
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> f) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), f);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_fused_sdp_choice", attention);
  // As between the CPU and a GPU: `parameter.data` and `model.to()` may change the device.
  m.impl("_has_compatible_shallow_copy_type", [](const at::Tensor&, const at::Tensor&) { return true; });
  m.impl("record_stream", [](at::Tensor&, c10::Stream) {});
}

// `cpu_fallback` writes back every tensor of a list, also those that were on the CPU before.
TORCH_LIBRARY_IMPL(aten, CPU, m) { m.impl("_copy_from_and_resize", copy_from_and_resize); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("generator", [] { return generator(); });
  m.def("set", [](py::object given, double seconds, int64_t bytes) {
    delete nap;
    nap = new py::object(given);
    kernel_s = seconds;
    limit = bytes;
  });
  m.def("synchronize", &synchronize, py::call_guard<py::gil_scoped_release>());
  m.def("memory", [] { return std::tuple(allocated, peak, reserved, limit); });
  m.def("empty_cache", [] { reserved = allocated; });
  m.def("reset_peak", [] { peak = allocated; });
}
