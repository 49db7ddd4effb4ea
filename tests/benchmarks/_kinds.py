"""Kinds of state that a step can change: what is there before, what a step does, what is looked at.

Each is plain code, so that the same kind is tried from a function and from a cell. There are a
`model`, its `optimizer`, a batch `x` and what `PRELUDE` imports.
"""

# ruff: noqa: E501  (rows of a table)

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """`before` makes it, `step` changes it, `probe` is an expression for what it is."""

    family: str
    name: str
    before: str
    step: str
    probe: str


PRELUDE = """
import abc, array, collections, copy, ctypes, dataclasses, decimal, enum, functools, io, itertools
import logging, mmap, operator, os, queue, random, sys, tempfile, types, warnings
import numpy as np
import torch
from torch import nn


class Plain:
    def __init__(self): self.n, self.log, self.inner = 0, [], {"a": [0]}


class Slotted:
    __slots__ = ("n", "late")
    def __init__(self): self.n = 0


@dataclasses.dataclass
class Data:
    n: int = 0
    log: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    log: list = dataclasses.field(default_factory=list)


class Counting:
    def __init__(self): self.n = 0
    def __call__(self): self.n += 1
    def step(self): self.n += 1
    @property
    def many(self): return self.n
    @many.setter
    def many(self, value): self.n = value


class Keeping(dict):
    pass


class Listed(list):
    pass


class Stubborn(dict):
    def __setitem__(self, key, value): raise TypeError("no")
    def add(self): dict.__setitem__(self, len(self), 1)


class Net(nn.Module):
    total = 0
    shared = []
    def __init__(self):
        super().__init__()
        self.body, self.n, self.log, self.array = nn.Linear(8, 2), 0, {"a": []}, np.zeros(3)
        self.rng, self.state, self.pair = np.random.default_rng(0), Plain(), ([], [])
        self.register_buffer("seen", torch.zeros(2))
    def forward(self, x): return self.body(x)


class Stream:
    def __init__(self): self.i = 0
    def __iter__(self): return self
    def __next__(self): self.i += 1; return self.i


class Color(enum.Enum):
    RED = 1


def fresh():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters()), torch.randn(4, 8)


model, optimizer, x = fresh()
"""

TRAIN = "loss = model(x).pow(2).mean(); loss.backward(); optimizer.step(); optimizer.zero_grad()"

KINDS: list[Kind] = []


def family(name: str, rows: str) -> None:
    """Rows of `name | before | step | probe`."""
    for row in rows.strip().splitlines():
        parts = [part.strip() for part in row.split(" | ")]
        assert len(parts) == 4, row
        KINDS.append(Kind(name, *parts))


family(
    "names",
    """
a global that is rebound | n = 0 | n += 1 | n
a global that a called function rebinds | m = 0; exec("def up():\\n    global m\\n    m += 1", globals()) | up() | m
a global that is made | made = None; del made | made = 1 | 'made' in globals()
a global that a function makes | exec("def make():\\n    global late\\n    late = 1", globals()) | make() | 'late' in globals()
a nonlocal | exec("def outer():\\n    n = 0\\n    def up():\\n        nonlocal n\\n        n += 1\\n    return up, lambda: n", globals()); up, now = outer() | up() | now()
a closure's list | exec("def outer():\\n    log = []\\n    return lambda: log.append(1), lambda: list(log)", globals()); up, now = outer() | up() | now()
a nonlocal two functions away | exec("def outer():\\n    n = 0\\n    def up():\\n        nonlocal n\\n        n += 1\\n    def call():\\n        up()\\n    return call, lambda: n", globals()); call, now = outer() | call() | now()
a tuple that is rebound | t = (0,) | t = (*t, 1) | t
""",
)

family(
    "functions",
    """
a default argument | exec("def f(v, log=[]):\\n    log.append(v)", globals()) | f(1) | list(f.__defaults__[0])
a keyword default | exec("def f(*, c=Plain()):\\n    c.n += 1", globals()) | f() | f.__kwdefaults__['c'].n
an attribute of a function | exec("def f(): f.n += 1", globals()); f.n = 0 | f() | f.n
a partial's argument | f = functools.partial(list.append, []) | f(1) | list(f.args[0])
a partial's keyword | f = functools.partial(lambda log: log.append(1), log=[]) | f() | list(f.keywords['log'])
a bound method | o = Counting(); f = o.step | f() | o.n
a bound builtin | o = []; f = o.append | f(1) | o
a callable object | o = Counting() | o() | o.n
a decorated function | log = []; f = functools.wraps(fresh)(lambda: log.append(1)) | f() | log
behind a library's decorator | o = Plain(); f = torch.no_grad()(lambda: o.log.append(1)) | f() | o.log
an lru_cache | f = functools.lru_cache(None)(lambda i: i) | f(f.cache_info().currsize) | f.cache_info().currsize
a cached_property | exec("class Lazy:\\n    @functools.cached_property\\n    def v(self): return 1", globals()); o = Lazy() | o.v | 'v' in vars(o)
a singledispatch's registry | f = functools.singledispatch(lambda o: 0) | f.register(int, lambda o: 1) | f(1)
a function's code | exec("def f(): return 1\\ndef g(): return 2", globals()) | f.__code__ = g.__code__ | f()
""",
)

family(
    "containers",
    """
a list | o = [1] | o.append(1) | o
a list in a list in a dict | o = {'a': [[]]} | o['a'][0].append(1) | o
six levels deep | o = {'a': {'b': {'c': {'d': {'e': []}}}}} | o['a']['b']['c']['d']['e'].append(1) | o
twenty levels deep | o = []; exec("p = o\\nfor _ in range(20):\\n    p.append([]); p = p[0]", globals()) | p.append(1) | p
the 33rd element of a list | o = [[] for _ in range(40)] | o[32].append(1) | o
the 5,000th element of a list | o = [[] for _ in range(6000)] | o[4999].append(1) | len(o[4999])
the value of the 1,000th key | o = {i: [] for i in range(1200)} | o[999].append(1) | len(o[999])
elements of a tuple | o = ([], {}) | o[0].append(1); o[1].update(a=1) | o
a named tuple's list | o = collections.namedtuple('P', 'a b')([], 0) | o.a.append(1) | list(o.a)
the order of a dict | o = {'a': 1, 'b': 2} | o['a'] = o.pop('a') | list(o)
a key that goes | o = {'a': 1, 'b': 2} | o.pop('a', None) | o
a defaultdict that is read | o = collections.defaultdict(list) | o['x'] | dict(o)
a defaultdict's factory | o = collections.defaultdict(list) | o.default_factory = None | o.default_factory
an OrderedDict's order | o = collections.OrderedDict(a=1, b=2) | o.move_to_end('a') | list(o)
a Counter | o = collections.Counter(a=1) | o.update('a') | dict(o)
a ChainMap | o = collections.ChainMap({}, {'a': []}) | o['b'] = 1; o['a'].append(1) | [dict(m) for m in o.maps]
a UserDict | o = collections.UserDict(a=[]) | o['a'].append(1); o['b'] = 1 | dict(o)
a full deque | o = collections.deque([1, 2, 3], maxlen=3) | o.append(4) | list(o)
a deque that turns | o = collections.deque([1, 2, 3]) | o.rotate(1) | list(o)
a set | o = {1} | o.add(2) | o
objects in a set | o = {Counting()} | next(iter(o)).step() | [one.n for one in o]
objects in a frozenset | o = frozenset([Counting()]) | next(iter(o)).step() | [one.n for one in o]
keys of a dict | k = Counting(); o = {k: 1} | next(iter(o)).step() | k.n
attributes of a dict's subclass | o = Keeping() | o.n = getattr(o, 'n', 0) + 1 | dict(vars(o))
attributes of a list's subclass | o = Listed(); o.log = [] | o.log.append(1); o.append(2) | (o.log, list(o))
a dict that refuses | o = Stubborn() | o.add() | dict(o)
a list that holds itself | o = []; o.append(o) | o.append(1) | len(o)
a mapping proxy's dict | d = {'a': []}; o = types.MappingProxyType(d) | o['a'].append(1) | dict(o)
a queue.Queue | o = queue.Queue() | o.put(1) | o.qsize()
a queue.PriorityQueue | o = queue.PriorityQueue() | o.put(1) | o.qsize()
a SimpleQueue | o = queue.SimpleQueue() | o.put(1) | o.qsize()
a bytearray | o = bytearray(b'ab') | o.extend(b'c') | bytes(o)
a bytearray in place | o = bytearray(b'ab') | o[0] = (o[0] + 1) % 256 | bytes(o)
an array.array | o = array.array('d', [1.0]) | o.append(1.0) | list(o)
a memoryview | b = bytearray(4); o = memoryview(b) | o[0] = (o[0] + 1) % 256 | bytes(b)
an anonymous mmap | o = mmap.mmap(-1, 16) | o[0] = (o[0] + 1) % 256 | o[:4]
a ctypes array | o = (ctypes.c_int * 3)() | o[0] += 1 | list(o)
a ctypes structure | o = type('S', (ctypes.Structure,), {'_fields_': [('n', ctypes.c_int)]})() | o.n += 1 | o.n
""",
)

family(
    "objects",
    """
an object of the user's | o = Plain() | o.n += 1 | o.n
its list | o = Plain() | o.log.append(1) | o.log
its nested dict | o = Plain() | o.inner['a'][0] += 1 | o.inner
an attribute that is made | o = Plain() | o.late = 1 | sorted(vars(o))
an attribute that goes | o = Plain() | vars(o).pop('n', None) | sorted(vars(o))
a whole new __dict__ | o = Plain() | o.__dict__ = {'n': 5} | sorted(vars(o))
a property | o = Counting() | o.many += 1 | o.n
a SimpleNamespace | o = types.SimpleNamespace(n=0) | o.n += 1 | o.n
slots | o = Slotted() | o.n += 1 | o.n
a slot without a value | o = Slotted() | o.late = 1 | hasattr(o, 'late')
a dataclass | o = Data() | o.n += 1; o.log.append(1) | (o.n, o.log)
a frozen dataclass | o = Frozen() | o.log.append(1) | o.log
a frozen dataclass, set by force | o = Frozen() | object.__setattr__(o, 'log', [1]) | o.log
a class attribute | Plain.total = 0 | Plain.total += 1 | Plain.total
a class attribute's list | Plain.every = [] | Plain.every.append(1) | Plain.every
a class attribute that is made | Plain.every = [] | Plain.made = 1 | 'made' in vars(Plain)
a base class's attribute | Plain.base = 0; o = type('Child', (Plain,), {})() | Plain.base += 1 | o.base
a method that is replaced | o = Counting() | Counting.step = lambda self: None | Counting.step.__name__
the class of an object | o = Plain() | o.__class__ = Counting | type(o).__name__
an enum's attribute | Color.RED.n = 0 | Color.RED.n += 1 | Color.RED.n
an exception's attribute | o = ValueError(); o.n = 0 | o.n += 1 | o.n
an ExitStack's callbacks | import contextlib; o = contextlib.ExitStack() | o.callback(print) | len(o._exit_callbacks)
a context variable | import contextvars; o = contextvars.ContextVar('o'); o.set(0) | o.set(o.get() + 1) | o.get()
a decimal context | o = decimal.Context() | o.prec += 1 | o.prec
""",
)

family(
    "modules and optimizers",
    """
parameters | pass | pass | model.state_dict()
a module's int | model = Net(); optimizer = torch.optim.SGD(model.parameters()) | model.n += 1 | model.n
a module's dict of lists | model = Net(); optimizer = torch.optim.SGD(model.parameters()) | model.log['a'].append(1) | model.log
a module's array | model = Net(); optimizer = torch.optim.SGD(model.parameters()) | model.array += 1 | model.array
a module's generator | model = Net(); optimizer = torch.optim.SGD(model.parameters()) | model.rng.random() | model.rng.bit_generator.state
a module's object | model = Net(); optimizer = torch.optim.SGD(model.parameters()) | model.state.log.append(1) | model.state.log
a module's tuple of lists | model = Net(); optimizer = torch.optim.SGD(model.parameters()) | model.pair[0].append(1) | model.pair
a module's class | model = Net(); optimizer = torch.optim.SGD(model.parameters()) | Net.total += 1; Net.shared.append(1) | (Net.total, Net.shared)
a buffer through .data | model = Net(); optimizer = torch.optim.SGD(model.parameters()) | model.seen.data.add_(1) | model.seen
a buffer that is replaced | model = Net(); optimizer = torch.optim.SGD(model.parameters()) | model.seen = model.seen + 1 | model.seen
a gradient of a buffer | model = Net(); optimizer = torch.optim.SGD(model.parameters()); model.seen.requires_grad_() | model.seen.sum().backward() | model.seen.grad
batch norm's statistics | model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)); optimizer = torch.optim.SGD(model.parameters()) | pass | model[1].running_mean
the training mode | pass | model.eval() | model.training
a submodule that is added | pass | model.late = nn.Identity() | list(model._modules)
a submodule that is replaced | pass | model[1] = nn.GELU() | type(model[1]).__name__
requires_grad | pass | model[0].bias.requires_grad_(False) | model[0].bias.requires_grad
a gradient that stays | model(x).sum().backward() | model(x).sum().backward() | model[0].weight.grad
a forward hook | pass | model[0].register_forward_hook(lambda *a: None) | len(model[0]._forward_hooks)
a forward hook's list | o = []; h = model[0].register_forward_hook(lambda *a: o.append(1)) | pass | o
a forward hook's list in a class | o = Plain(); h = model[0].register_forward_hook(lambda *a: o.log.append(1)) | pass | o.log
a backward hook | pass | model[0].register_full_backward_hook(lambda *a: None) | len(model[0]._backward_hooks)
a hook that is removed | h = model[0].register_forward_hook(lambda *a: None) | h.remove() | len(model[0]._forward_hooks)
a parameter's hook | pass | model[0].weight.register_hook(lambda g: g) | len(model[0].weight._backward_hooks or {})
a hook after accumulating | pass | model[0].weight.register_post_accumulate_grad_hook(lambda p: None) | len(model[0].weight._post_accumulate_grad_hooks or {})
an optimizer's hook | pass | optimizer.register_step_post_hook(lambda *a: None) | len(optimizer._optimizer_step_post_hooks)
a state_dict hook | pass | model.register_state_dict_post_hook(lambda *a: None) | len(model._state_dict_hooks)
a learning rate | pass | optimizer.param_groups[0]['lr'] *= 0.9 | optimizer.param_groups[0]['lr']
a parameter group | late = nn.Linear(2, 2) | len(optimizer.param_groups) == 1 and optimizer.add_param_group({'params': list(late.parameters())}) | len(optimizer.param_groups)
an optimizer's state | pass | pass | len(optimizer.state)
an optimizer's attribute | optimizer.n = 0 | optimizer.n += 1 | optimizer.n
LBFGS | optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2) | pass | (model.state_dict(), optimizer.state_dict())
a scheduler | o = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10**6) | o.step() | o.state_dict()
a plateau scheduler | o = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0) | o.step(1.0) | (o.state_dict(), optimizer.param_groups[0]['lr'])
chained schedulers | o = torch.optim.lr_scheduler.SequentialLR(optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 1)], [2]) | o.step() | (o.last_epoch, optimizer.param_groups[0]['lr'])
AveragedModel | o = torch.optim.swa_utils.AveragedModel(model) | o.update_parameters(model) | o.state_dict()
a GradScaler | o = torch.amp.GradScaler('cpu', init_scale=8.0, growth_interval=1) | o.scale(model(x).sum()).backward(); o.step(optimizer); o.update() | o.get_scale()
a failing state_dict | exec("class Bad:\\n    n = 0\\n    def state_dict(self): raise AttributeError('no')\\n    def load_state_dict(self, d): raise AttributeError('no')", globals()); o = Bad(); o.n = 0 | o.n += 1 | o.n
weight norm | model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 2))); optimizer = torch.optim.SGD(model.parameters()) | pass | model.state_dict()
spectral norm's vectors | model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 2))); optimizer = torch.optim.SGD(model.parameters()) | pass | model.state_dict()
pruning in the step | import torch.nn.utils.prune as prune | prune.is_pruned(model) or prune.random_unstructured(model[0], 'weight', 0.5) | sorted(model.state_dict())
a parameter outside the model, fused | z = nn.Parameter(torch.ones(2)); o = torch.optim.AdamW([z], fused=True) | z.sum().backward(); o.step() | (z, z.grad)
a parameter outside the model | z = nn.Parameter(torch.ones(2)); o = torch.optim.SGD([z]) | z.sum().backward(); o.step() | (z, z.grad)
a second model | net = nn.Linear(2, 2); o = torch.optim.SGD(net.parameters()) | net(torch.ones(1, 2)).sum().backward(); o.step() | net.state_dict()
a scripted module's parameters | net = torch.jit.script(nn.Linear(2, 2)); o = torch.optim.SGD(net.parameters()) | net(torch.ones(1, 2)).sum().backward(); o.step() | net.state_dict()
""",
)

family(
    "tensors",
    """
in place | t = torch.zeros(3) | t.add_(1) | t
through .data | t = torch.zeros(3) | t.data.mul_(2).add_(1) | t
through .numpy() | t = torch.zeros(3) | t.numpy()[0] += 1 | t
through a view | t = torch.zeros(3, 3); v = t[0] | v.add_(1) | t
through a storage | t = torch.zeros(3) | t.untyped_storage().fill_(1) | t
by _foreach | ts = [torch.zeros(2) for _ in range(50)] | torch._foreach_add_(ts, 1) | ts
a minus before zero | t = torch.zeros(3) | t.neg_() | t.numpy().tobytes()
new .data | t = torch.zeros(3) | t.data = torch.ones(3) | t
another shape by resize_ | t = torch.zeros(3) | t.resize_(5).fill_(2) | (t.shape, t.tolist())
another shape by .data | t = torch.zeros(3) | t.data = torch.ones(2, 2) | (t.shape, t.tolist())
another dtype by .data | t = torch.zeros(3) | t.data = t.data.double() | t.dtype
transposed in place | t = torch.arange(6.0).view(2, 3) | t.t_() | (t.shape, t.stride())
requires_grad of a tensor | t = torch.zeros(3) | t.requires_grad_() | t.requires_grad
a graph written into one | t = torch.zeros(2) | t.detach_(); t += model(x).sum() | (t.is_leaf, t.tolist())
its gradient | t = torch.zeros(3, requires_grad=True) | t.sum().backward() | t.grad
its attribute | t = torch.zeros(3); t.log = [] | t.log.append(1) | t.log
expanded | t = torch.zeros(1).expand(3) | t[:1].add_(1) | t
overlapping | t = torch.zeros(4).unfold(0, 2, 1) | t[0].add_(1) | t.tolist()
a column | base = torch.zeros(3, 3); t = base[:, 1] | t.add_(1) | base
complex | t = torch.zeros(3, dtype=torch.complex64) | t.add_(1j) | t
bf16 | t = torch.zeros(3, dtype=torch.bfloat16) | t.add_(1) | t.float()
int8 | t = torch.zeros(3, dtype=torch.int8) | t.add_(1) | t
bool | t = torch.zeros(3, dtype=torch.bool) | t.logical_not_() if not bool(t[0]) else None | t
float8 | t = torch.zeros(4).to(torch.float8_e4m3fn) | t.copy_(torch.ones(4)) | t.float()
nan | t = torch.full((2,), float('nan')) | t.fill_(1) | t.isnan().tolist()
sparse COO, its values | t = torch.eye(3).to_sparse().coalesce() | t.values().add_(1) | t.to_dense()
sparse COO, its shape | t = torch.eye(3).to_sparse().coalesce() | t.sparse_resize_((4, 4), 2, 0) | t.shape
sparse CSR | t = torch.eye(3).to_sparse_csr() | t.values().add_(1) | t.to_dense()
sparse CSC | t = torch.eye(3).to_sparse_csc() | t.values().add_(1) | t.to_dense()
quantized | t = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8) | t.copy_(torch.ones(3)) | t.int_repr()
inference | t = torch.inference_mode()(torch.zeros)(3) | torch.inference_mode()(t.add_)(1) | t.tolist()
a subclass | t = torch.zeros(3).as_subclass(type('T', (torch.Tensor,), {})) | t.add_(1) | t.tolist()
tensors in a dict's dict | o = {'ema': {n: p.detach().clone() for n, p in model.named_parameters()}} | [v.data.mul_(0.9) for v in o['ema'].values()] | o
too large to copy | t = torch.zeros(80_000_000, dtype=torch.float32) | t[5] += 1 | t[:9]
""",
)

family(
    "arrays",
    """
an array | a = np.zeros(3) | a += 1 | a
a view of an array | b = np.zeros((3, 3)); a = b[::2] | a += 1 | b
an array of objects | a = np.array([[], [1]], dtype=object) | a[0].append(1) | [list(o) for o in a]
an array of objects, replaced | a = np.array([None, None], dtype=object) | a[0] = 1 | list(a)
a structured array | a = np.zeros(2, dtype=[('n', int), ('v', float)]) | a['n'] += 1 | a.tolist()
another shape of an array | a = np.zeros(6) | a.shape = (2, 3) | a.shape
a larger array | a = np.zeros(2) | a.resize(3, refcheck=False) | a.shape
a masked array | a = np.ma.array([1.0, 2.0], mask=[0, 1]) | a[0] = np.ma.masked | a.mask.tolist()
an array that is nan | a = np.full(2, np.nan) | a[0] = 1 | np.isnan(a).tolist()
a read-only array | a = np.zeros(2); a.flags.writeable = False | a.flags.writeable = True; a += 1 | a
a matrix in a dict | o = {'a': np.zeros((2, 2))} | o['a'][0] += 1 | o
an array and a tensor of one memory | a = np.zeros(3); t = torch.from_numpy(a) | t.add_(1) | a
""",
)

family(
    "random numbers",
    """
torch's | pass | torch.rand(1) | torch.get_rng_state()
Python's | pass | random.random() | random.getstate()
numpy's | pass | np.random.rand() | np.random.get_state()[1]
a random.Random | o = random.Random(0) | o.random() | o.getstate()
a Generator | o = np.random.default_rng(0) | o.random() | o.bit_generator.state
a bit generator | o = np.random.MT19937(0) | o.random_raw() | o.state
a RandomState | o = np.random.RandomState(0) | o.rand() | o.get_state()[1]
a torch.Generator | o = torch.Generator() | torch.rand(1, generator=o) | o.get_state()
a loader's generator | o = torch.utils.data.DataLoader(range(9), shuffle=True, generator=torch.Generator()) | next(iter(o)) | o.generator.get_state()
""",
)

family(
    "iterators and files",
    """
a list's iterator | it = iter([1, 2, 3]) | next(it) | operator.length_hint(it)
a range's iterator | it = iter(range(10**6)) | next(it) | operator.length_hint(it)
a reversed list | it = reversed([1, 2, 3]) | next(it) | operator.length_hint(it)
itertools.count | it = itertools.count() | next(it) | repr(it)
itertools.cycle | it = itertools.cycle([1, 2, 3]); got = [next(it)] | next(it) | next(it) - 1 if got.pop() else 0
a zip | it = zip(range(9), range(9)) | next(it) | tuple(it)
an enumerate | it = enumerate('abc') | next(it) | list(it)
a map | it = map(str, range(9)) | next(it) | list(it)
a dict's iterator | it = iter({'a': 1, 'b': 2}) | next(it) | list(it)
a generator | it = (i for i in range(9)) | next(it) | list(it)
a generator function's list | o = []; exec("def many():\\n    while True:\\n        o.append(1); yield 1", globals()); it = many() | next(it) | o
a generator in a dict | o = {'it': (i for i in range(9))} | next(o['it']) | list(o['it'])
a generator in an object | o = Plain(); o.it = (i for i in range(9)) | next(o.it) | list(o.it)
a generator in a tuple | o = ((i for i in range(9**9)),) | next(o[0]) | o[0].gi_frame.f_locals.get('i')
an iterator of the user's | it = Stream() | next(it) | it.i
a loader's iterator | it = iter(torch.utils.data.DataLoader(torch.arange(64.0), batch_size=4)) | next(it) | it._num_yielded
the batches of a shuffled one | it = iter(torch.utils.data.DataLoader(torch.arange(64.0), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0))); o = copy.deepcopy(torch.randperm(64, generator=torch.Generator().manual_seed(0))) | next(it) | it._num_yielded
a StringIO | f = io.StringIO() | f.write('x') | f.getvalue()
a BytesIO's position | f = io.BytesIO(b'abc') | f.read(1) | f.tell()
a file that is read | open('kinds.txt', 'w').write('abc' * 99999); f = open('kinds.txt') | f.read(1) | f.tell()
a file that is written | f = open('kinds.out', 'w') | f.write('x') | f.tell()
""",
)

family(
    "the process",
    """
the default dtype | pass | torch.set_default_dtype(torch.float32 if torch.get_default_dtype() == torch.float64 else torch.float32); torch.set_default_dtype(torch.float32) | torch.get_default_dtype()
the default device | pass | torch.set_default_device('cpu') | torch._GLOBAL_DEVICE_CONTEXT.__dict__.get('device_context')
threads | pass | torch.set_num_threads(1 if torch.get_num_threads() > 1 else 2) | torch.get_num_threads()
float32 matmul precision | pass | torch.set_float32_matmul_precision('medium') | torch.get_float32_matmul_precision()
deterministic algorithms | pass | torch.use_deterministic_algorithms(True, warn_only=True) | (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
anomaly mode | pass | torch.autograd.set_detect_anomaly(True) | torch.is_anomaly_enabled()
flush_denormal | pass | torch.set_flush_denormal(True) | (torch.full((1,), 1e-310, dtype=torch.float64) * 1).item() == 0
grad mode | pass | torch.set_grad_enabled(True); model(x).sum().backward(); torch.set_grad_enabled(True) | torch.is_grad_enabled()
cudnn.benchmark | pass | torch.backends.cudnn.benchmark = True | torch.backends.cudnn.benchmark
cudnn.enabled | pass | torch.backends.cudnn.enabled = False | torch.backends.cudnn.enabled
mkldnn.enabled | pass | torch.backends.mkldnn.enabled = False; torch.backends.mkldnn.flags | torch.backends.mkldnn.enabled
an SDPA backend | pass | torch.backends.cuda.enable_flash_sdp(False) | torch.backends.cuda.flash_sdp_enabled()
the autocast cache | pass | torch.set_autocast_cache_enabled(False) | torch.is_autocast_cache_enabled()
printing of tensors | pass | torch.set_printoptions(precision=2) | torch._tensor_str.PRINT_OPTS.precision
printing of arrays | pass | np.set_printoptions(precision=2) | np.get_printoptions()['precision']
numpy's errors | pass | np.seterr(all='ignore') | np.geterr()
an environment variable | pass | os.environ['SPEEDKIT_KINDS_X'] = '1' | os.environ.get('SPEEDKIT_KINDS_X')
the working directory | pass | os.chdir(tempfile.gettempdir()) | os.getcwd()
sys.path | pass | sys.path.append('x') | 'x' in sys.path
warnings' filters | pass | warnings.simplefilter('ignore', ImportWarning) | len(warnings.filters)
a logger's level | o = logging.getLogger('kinds'); o.setLevel(30) | o.setLevel(10) | o.level
the recursion limit | pass | sys.setrecursionlimit(sys.getrecursionlimit() + 1) | sys.getrecursionlimit()
gc's thresholds | import gc | gc.set_threshold(500, 10, 10) | gc.get_threshold()
the decimal precision | pass | decimal.getcontext().prec = 10 | decimal.getcontext().prec
""",
)
