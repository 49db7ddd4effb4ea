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
import abc, array, asyncio, collections, concurrent.futures, contextlib, contextvars, copy, csv, ctypes
import dataclasses, decimal, enum, functools, gzip, hashlib, heapq, inspect, io, itertools, logging
import mmap, multiprocessing, multiprocessing.shared_memory, operator, os, queue, random, re, socket
import sqlite3, struct, sys, tempfile, threading, types, warnings, weakref, zlib
import xml.etree.ElementTree as ET
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

family(
    "weak references",
    """
what a reference leads to | k = Plain(); o = weakref.ref(k); HOLD = [k] | o().log.append(1) | k.log
what only a reference leads to | exec("def make():\\n    k = Plain()\\n    HOLDS.append(k)\\n    return weakref.ref(k)", globals()); HOLDS = []; o = make() | o().n += 1 | HOLDS[0].n
what a proxy leads to | k = Plain(); o = weakref.proxy(k) | o.log.append(1); o.n += 1 | (k.log, k.n)
what a callable proxy leads to | k = Counting(); o = weakref.proxy(k) | o() | k.n
a weak method's object | k = Counting(); o = weakref.WeakMethod(k.step) | o()() | k.n
a WeakKeyDictionary | k = Plain(); o = weakref.WeakKeyDictionary({k: 0}) | o[k] += 1 | o[k]
its list | k = Plain(); o = weakref.WeakKeyDictionary({k: []}) | o[k].append(1) | o[k]
a key that goes from one | k = Plain(); o = weakref.WeakKeyDictionary({k: 0}) | o.pop(k, None) | len(o)
a WeakValueDictionary | k = Plain(); o = weakref.WeakValueDictionary({1: k}) | o[2] = k | sorted(o)
its object | k = Plain(); o = weakref.WeakValueDictionary({1: k}) | o[1].log.append(1) | k.log
a WeakSet | k = Plain(); o = weakref.WeakSet() | o.add(k) | len(o)
objects in a WeakSet | k = Plain(); o = weakref.WeakSet([k]) | next(iter(o)).log.append(1) | k.log
a descriptor's weak dict | exec("class De:\\n    def __init__(s): s.v = weakref.WeakKeyDictionary()\\n    def __get__(s, o, t): return s.v.get(o, 0)\\n    def __set__(s, o, x): s.v[o] = x\\nclass Holds:\\n    d = De()", globals()); o = Holds() | o.d += 1 | o.d
a model behind a reference | k = nn.Linear(2, 2); o = weakref.ref(k) | o().weight.data.add_(1) | k.weight
""",
)

family(
    "threads and locks",
    """
a threading.local's number | o = threading.local(); o.n = 0 | o.n += 1 | o.n
a threading.local's list | o = threading.local(); o.log = [] | o.log.append(1) | o.log
an attribute that a threading.local gets | o = threading.local() | o.late = 1 | sorted(vars(o))
a derived threading.local | exec("class Own(threading.local):\\n    n = 0", globals()); o = Own(); o.log = [] | o.n += 1; o.log.append(1) | (o.n, o.log)
a Lock | o = threading.Lock() | o.acquire(blocking=False) | o.locked()
a Lock that is released | o = threading.Lock(); o.acquire() | o.locked() and o.release() | o.locked()
an RLock | o = threading.RLock() | o.acquire(blocking=False) | 'count=0' in repr(o)
an Event | o = threading.Event() | o.set() | o.is_set()
an Event that is cleared | o = threading.Event(); o.set() | o.clear() | o.is_set()
a Semaphore | o = threading.Semaphore(5) | o.acquire(blocking=False) | o._value
a BoundedSemaphore | o = threading.BoundedSemaphore(5) | o.acquire(blocking=False) | o._value
a Condition | o = threading.Condition() | o.acquire(blocking=False) | 'count=0' in repr(o._lock)
a Barrier | o = threading.Barrier(2) | o.abort() | o.broken
a lock in an object | o = Plain(); o.lock = threading.Lock() | o.lock.acquire(blocking=False) | o.lock.locked()
an asyncio.Queue | o = asyncio.Queue() | o.put_nowait(1) | o.qsize()
an asyncio.Event | o = asyncio.Event() | o.set() | o.is_set()
an asyncio.Semaphore | o = asyncio.Semaphore(3) | o._value -= 1 | o._value
an asyncio.Future | loop = asyncio.new_event_loop(); o = loop.create_future() | o.done() or o.set_result(1) | o.done()
a Future | o = concurrent.futures.Future() | o.done() or o.set_result(1) | o.done()
an executor's work | pool = concurrent.futures.ThreadPoolExecutor(1); o = [] | pool.submit(o.append, 1).result() | o
a LifoQueue | o = queue.LifoQueue() | o.put(1) | (o.qsize(), o.unfinished_tasks)
a coroutine | exec("async def co():\\n    await asyncio.sleep(0)", globals()); o = co() | inspect.getcoroutinestate(o) == 'CORO_CREATED' and o.send(None) | inspect.getcoroutinestate(o)
an async generator | exec("async def many():\\n    while True:\\n        yield 1", globals()); o = many() | [None for _ in [0] if o.ag_frame and not o.ag_running and contextlib.suppress(StopIteration).__enter__() is None and next(iter([o.aclose().close()]))] | o.ag_frame.f_lasti
a context variable | o = contextvars.ContextVar('o', default=0) | o.set(o.get() + 1) | o.get()
a context variable's list | o = contextvars.ContextVar('o'); o.set([]) | o.get().append(1) | o.get()
a context variable without a value | o = contextvars.ContextVar('o') | o.set(1) | o.get(None)
""",
)

family(
    "processes",
    """
a SharedMemory | o = multiprocessing.shared_memory.SharedMemory(create=True, size=16); weakref.finalize(o, o.unlink) if 0 else o.unlink() | o.buf[0] = (o.buf[0] + 1) % 256 | bytes(o.buf[:4])
a ShareableList | o = multiprocessing.shared_memory.ShareableList([0, 0]); o.shm.unlink() | o[0] = 1 | list(o)
a multiprocessing.Value | o = multiprocessing.Value('i', 0) | o.value += 1 | o.value
a multiprocessing.Array | o = multiprocessing.Array('i', 3) | o[0] += 1 | list(o)
a RawArray | o = multiprocessing.sharedctypes.RawArray('i', 3) | o[0] += 1 | list(o)
a multiprocessing.Queue | o = multiprocessing.Queue() | o.put(1) | (__import__('time').sleep(0.05), o.empty())[1]
a multiprocessing.SimpleQueue | o = multiprocessing.SimpleQueue() | o.empty() and o.put(1) | o.empty()
a Pipe | o, end = multiprocessing.Pipe() | end.poll() or o.send(1) | end.poll()
a multiprocessing.Event | o = multiprocessing.Event() | o.set() | o.is_set()
a multiprocessing.Semaphore | o = multiprocessing.Semaphore(500) | o.acquire(False) | o.get_value()
a multiprocessing.Lock | o = multiprocessing.Lock() | o.acquire(False) | o._semlock._get_value()
a socket | o, end = socket.socketpair() | end.settimeout(0.01) or o.send(b'x') | bool(__import__('select').select([end], [], [], 0)[0])
""",
)

family(
    "views",
    """
values of a dict | d = {'a': []}; o = d.values() | next(iter(o)).append(1) | d
items of a dict | d = {'a': []}; o = d.items() | next(iter(o))[1].append(1) | d
keys of a dict, objects | k = Counting(); d = {k: 1}; o = d.keys() | next(iter(o)).step() | k.n
values of an OrderedDict | d = collections.OrderedDict(a=[]); o = d.values() | next(iter(o)).append(1) | list(d['a'])
a proxy of a dict that grows | d = {'a': 1}; o = types.MappingProxyType(d); put = functools.partial(operator.setitem, d) | len(o) and put('b', 1) | dict(o)
a class's own view | exec("class Viewed:\\n    log = []", globals()); o = vars(Viewed) | o['log'].append(1) | Viewed.log
what a memoryview is of | b = bytearray(4); o = memoryview(b).cast('I') | o[0] += 1 | bytes(b)
a memoryview of an array | b = np.zeros(3); o = memoryview(b) | o[0] += 1 | b
a memoryview of array.array | b = array.array('d', [0.0]); o = memoryview(b) | o[0] += 1 | list(b)
a ctypes pointer | b = (ctypes.c_int * 3)(); o = ctypes.cast(b, ctypes.POINTER(ctypes.c_int)) | o[0] += 1; o[2] += 1 | list(b)
a ctypes pointer to another | b, d = ctypes.c_int(1), ctypes.c_int(2); o = ctypes.pointer(b) | o.contents = d | o.contents.value
a ctypes number | o = ctypes.c_double(0) | o.value += 1 | o.value
a ctypes buffer | o = ctypes.create_string_buffer(4) | o.value = b'ab' | o.raw
a ctypes union | o = type('U', (ctypes.Union,), {'_fields_': [('n', ctypes.c_int), ('f', ctypes.c_float)]})() | o.f += 1 | o.n
a mmap's file | f = open('kinds.map', 'w+b'); f.truncate(16); o = mmap.mmap(f.fileno(), 16) | o[0] = (o[0] + 1) % 256 | o[:4]
""",
)

family(
    "exceptions",
    """
its arguments | o = ValueError('a') | o.args += (1,) | o.args
an argument's list | o = ValueError([]) | o.args[0].append(1) | o.args
its cause | o = ValueError('a') | o.__cause__ = KeyError('b') | repr(o.__cause__)
its context | o = ValueError('a') | o.__context__ = KeyError('b') | repr(o.__context__)
its notes | o = ValueError('a') | o.add_note('x') | getattr(o, '__notes__', [])
its traceback | o = ValueError('a') | exec("try:\\n    raise o\\nexcept ValueError:\\n    pass", {'o': o}) | o.__traceback__ is None
an attribute of one | o = ValueError('a'); o.log = [] | o.log.append(1) | o.log
an OSError's number | o = OSError(2, 'no') | o.errno += 1 | o.errno
a StopIteration's value | o = StopIteration(1) | o.value = 5 | o.value
a group's inner one | o = ExceptionGroup('g', [ValueError([])]) | o.exceptions[0].args[0].append(1) | o.exceptions[0].args
an exception's class | exec("class Own(Exception):\\n    raised = 0", globals()); o = Own() | Own.raised += 1 | Own.raised
""",
)

family(
    "names of functions and classes",
    """
a function's name | exec("def f(v=1): pass", globals()) | f.__name__ = 'g' | f.__name__
a function's qualified name | exec("def f(v=1): pass", globals()) | f.__qualname__ = 'g' | f.__qualname__
a function's docstring | exec("def f(v=1): pass", globals()) | f.__doc__ = 'g' | f.__doc__
a function's module | exec("def f(v=1): pass", globals()) | f.__module__ = 'g' | f.__module__
a function's annotations | exec("def f(v: int = 1): pass", globals()) | f.__annotations__['w'] = 1 | f.__annotations__
annotations of one without | exec("def f(v=1): pass", globals()) | f.__annotations__['w'] = 1 | f.__annotations__
new annotations | exec("def f(v: int = 1): pass", globals()) | f.__annotations__ = {'w': 1} | f.__annotations__
new default arguments | exec("def f(v=1): return v", globals()) | f.__defaults__ = (2,) | f()
new keyword defaults | exec("def f(*, v=1): return v", globals()) | f.__kwdefaults__ = {'v': 2} | f()
a keyword default that is added | exec("def f(*, v=1): return v", globals()) | f.__kwdefaults__['v'] = 2 | f()
what a decorator wraps | f = functools.wraps(fresh)(lambda: 1) | f.__wrapped__ = len | f.__wrapped__.__name__
a whole new __dict__ of a function | exec("def f(): pass", globals()); f.n = 0 | f.__dict__ = {'n': 1} | f.n
a class's name | exec("class A: pass", globals()) | A.__name__ = 'B' | A.__name__
a class's qualified name | exec("class A: pass", globals()) | A.__qualname__ = 'B' | A.__qualname__
a class's docstring | exec("class A:\\n    'a'", globals()) | A.__doc__ = 'b' | A.__doc__
a class's module | exec("class A: pass", globals()) | A.__module__ = 'b' | A.__module__
a class's bases | exec("class A: pass\\nclass B: pass\\nclass C(A): pass", globals()) | C.__bases__ = (B,) | [one.__name__ for one in C.__bases__]
a class's annotations | exec("class A:\\n    n: int", globals()) | A.__annotations__['m'] = int | sorted(A.__annotations__)
annotations of a class without | exec("class A: pass", globals()) | A.__annotations__['m'] = int | sorted(A.__annotations__)
a method that is replaced | exec("class A:\\n    def f(self): return 1", globals()) | A.f = lambda self: 2 | A().f()
a class's metaclass | exec("class M(type): pass\\nclass N(type): pass\\nclass A(metaclass=M): pass", globals()) | A.__class__ = N | type(A).__name__
a metaclass's attribute | exec("class M(type):\\n    n = 0\\n    log = []\\nclass A(metaclass=M): pass", globals()) | M.n += 1; type(A).log.append(1) | (M.n, M.log)
ABC.register | exec("class A(abc.ABC): pass", globals()) | A.register(int) | issubclass(int, A)
abstract methods | exec("class A(abc.ABC):\\n    @abc.abstractmethod\\n    def f(self): pass", globals()) | A.__abstractmethods__ = frozenset() | sorted(A.__abstractmethods__)
a property's docstring | exec("class A:\\n    @property\\n    def f(self): return 1", globals()) | vars(A)['f'].__doc__ = 'x' | A.f.__doc__
a property that is replaced | exec("class A:\\n    @property\\n    def f(self): return 1", globals()) | A.f = A.f.getter(lambda self: 2) | A().f
a static method's attribute | exec("class A:\\n    @staticmethod\\n    def f(): pass", globals()); vars(A)['f'].n = 0 | vars(A)['f'].n += 1 | vars(A)['f'].n
a partial's state | f = functools.partial(max, 1) | f.__setstate__((min, (2,), {}, None)) | (f.func.__name__, f.args)
a partialmethod's list | exec("class A:\\n    log = []\\n    def f(self, to): to.append(1)\\n    g = functools.partialmethod(f, log)", globals()); o = A() | o.g() | A.log
a singledispatchmethod | exec("class A:\\n    @functools.singledispatchmethod\\n    def f(self, v): return 0", globals()) | vars(A)['f'].register(int, lambda self, v: 1) | A().f(1)
a method's lru_cache | exec("class A:\\n    @functools.lru_cache\\n    def f(self, v): return v", globals()); o = A() | o.f(o.f.cache_info().currsize) | A.f.cache_info().currsize
an enum member's attribute | exec("class E(enum.Enum):\\n    A = 1", globals()) | E.A.n = getattr(E.A, 'n', 0) + 1 | getattr(E.A, 'n', 0)
an enum member's list | exec("class E(enum.Enum):\\n    A = []", globals()) | E.A.value.append(1) | E.A.value
a flag that is made up | exec("class E(enum.Flag):\\n    A = 1\\n    B = 2", globals()) | E(3) | len(E._value2member_map_)
slots through inheritance | exec("class A:\\n    __slots__ = ('a',)\\nclass B(A):\\n    __slots__ = ('b', '__dict__')", globals()); o = B(); o.a = 0; o.b = []; o.c = 0 | o.a += 1; o.b.append(1); o.c += 1 | (o.a, o.b, o.c)
private slots | exec("class A:\\n    __slots__ = ('__a',)\\n    def __init__(s): s.__a = 0\\n    def up(s): s.__a += 1\\n    def get(s): return s.__a", globals()); o = A() | o.up() | o.get()
a slot behind another | exec("class A:\\n    __slots__ = ('a',)\\nclass B(A):\\n    __slots__ = ('a',)\\n    def up(s): A.a.__set__(s, A.a.__get__(s) + 1)", globals()); o = B(); A.a.__set__(o, 0) | o.up() | A.a.__get__(o)
a frozen dataclass with slots | exec("@dataclasses.dataclass(frozen=True, slots=True)\\nclass A:\\n    n: int = 0", globals()); o = A() | object.__setattr__(o, 'n', o.n + 1) | o.n
another class of an object | exec("class A: pass\\nclass B: pass", globals()); o = A() | o.__class__ = B | type(o).__name__
an int's attribute | exec("class A(int): pass", globals()); o = A(3); o.log = [] | o.log.append(1) | o.log
a tuple's attribute | exec("class A(tuple): pass", globals()); o = A(([],)); o.n = 0 | o.n += 1; o[0].append(1) | (o.n, list(o[0]))
attributes behind __getattribute__ | exec("class A:\\n    def __init__(s): object.__setattr__(s, '_d', {'n': 0})\\n    def __getattribute__(s, k): return object.__getattribute__(s, '_d')[k] if k != '__class__' else A\\n    def __setattr__(s, k, v): object.__getattribute__(s, '_d')[k] = v", globals()); o = A() | o.n += 1 | o.n
an object that equals everything | exec("class A:\\n    n = 0\\n    __hash__ = None\\n    def __eq__(s, o): return True", globals()); o = [A()] | o[0] = A(); o[0].n = 1 | o[0].n
an object of another class | exec("class A:\\n    n = 0\\n    __class__ = property(lambda s: int)", globals()); o = A() | o.n += 1 | o.n
""",
)

family(
    "C objects",
    """
an element of a tree | o = ET.Element('a') | ET.SubElement(o, 'b'); o.set('k', 'v') | (len(o), dict(o.attrib))
an element's text, deep | o = ET.Element('a'); b = ET.SubElement(o, 'b') | o[0].text = 'x' | b.text
a hash | o = hashlib.sha256() | o.update(b'a') | o.hexdigest()
a compressor | o = zlib.compressobj() | o.compress(os.urandom(1000)) | len(o.copy().flush()) < 100
a database | o = sqlite3.connect(':memory:'); o.execute('create table t(a)') | o.execute('insert into t values (1)') | o.execute('select count(*) from t').fetchone()
a pickler | f = io.BytesIO(); o = __import__('pickle').Pickler(f) | o.dump([1]) | f.getvalue()
a heap | o = [3, 4]; heapq.heapify(o) | heapq.heappush(o, 1) | o
an ExitStack | o = contextlib.ExitStack() | o.callback(print) | len(o._exit_callbacks)
a struct's iterator | o = struct.iter_unpack('b', b'a' * 10**5) | next(o) | operator.length_hint(o)
a regular expression's iterator | o = re.finditer('a', 'a' * 10**5) | next(o) | next(o).start()
a csv reader | o = csv.reader(['a,b'] * 10**5) | next(o) | o.line_num
a csv writer | f = io.StringIO(); o = csv.writer(f) | o.writerow([1]) | f.getvalue()
a text over bytes | f = io.BytesIO(); o = io.TextIOWrapper(f) | o.write('a'); o.flush() | f.getvalue()
a binary file that is read | open('kinds.bin', 'wb').write(b'abc' * 9999); o = open('kinds.bin', 'rb') | o.read(1) | o.tell()
a raw file that is read | open('kinds.bin', 'wb').write(b'abc' * 9999); o = open('kinds.bin', 'rb', buffering=0) | o.read(1) | o.tell()
a gzip file that is read | gzip.open('kinds.gz', 'wb').write(b'abc' * 9999); o = gzip.open('kinds.gz') | o.read(1) | o.tell()
a temporary file | o = tempfile.NamedTemporaryFile() | o.write(b'x') | o.tell()
numpy's seeds | o = np.random.SeedSequence(0) | o.spawn(1) | o.n_children_spawned
children of a generator | o = np.random.default_rng(0) | o.spawn(1) | o.bit_generator.seed_seq.n_children_spawned
""",
)

family(
    "itertools",
    """
accumulate | o = itertools.accumulate(range(10**6)) | next(o) | next(o)
chain | o = itertools.chain([1, 2], [3]) | next(o) | list(o)
combinations | o = itertools.combinations(range(30), 2) | next(o) | next(o)
compress | o = itertools.compress(range(10**6), itertools.repeat(1)) | next(o) | next(o)
dropwhile | o = itertools.dropwhile(bool, range(10**6)) | next(o) | next(o)
filter | o = filter(None, range(10**6)) | next(o) | next(o)
filterfalse | o = itertools.filterfalse(None, [0] * 10**5) | next(o) | len(list(o))
groupby | o = itertools.groupby(range(10**5)) | next(o) | next(o)[0]
islice | o = itertools.islice(range(10**6), 10**6) | next(o) | next(o)
islice of a counter | c = itertools.count(); o = itertools.islice(c, None) | next(o) | next(c)
pairwise | o = itertools.pairwise(range(10**6)) | next(o) | next(o)
permutations | o = itertools.permutations(range(9)) | next(o) | next(o)
product | o = itertools.product(range(99), repeat=3) | next(o) | next(o)
repeat | o = itertools.repeat(1, 10**6) | next(o) | operator.length_hint(o)
starmap | o = itertools.starmap(max, zip(range(10**6), range(10**6))) | next(o) | next(o)
takewhile | o = itertools.takewhile(lambda i: True, range(10**6)) | next(o) | next(o)
tee | o, p = itertools.tee(iter(range(10**6))) | next(o) | (next(o), next(p))
zip_longest | o = itertools.zip_longest(range(10**6), [1]) | next(o) | next(o)
a set's iterator | o = iter({1, 2, 3}) | next(o) | operator.length_hint(o)
a sentinel's iterator | n0 = Counting(); o = iter(lambda: n0.step(), 5) | next(o) | n0.n
""",
)

family(
    "torch's objects",
    """
a storage | o = torch.zeros(2).untyped_storage() | o.fill_(1) | list(o)
a storage's size | o = torch.zeros(2).untyped_storage() | o.resize_(64) | o.nbytes()
a typed storage | o = torch.zeros(2).storage() | o.fill_(1) | list(o)
a tensor that is shared now | t = torch.zeros(3) | t.share_memory_().add_(1) | (t.is_shared(), t.tolist())
a tensor that was shared | t = torch.zeros(3).share_memory_() | t.add_(1) | t
set_ | t = torch.zeros(3) | t.set_(torch.ones(3)) | t
a hook of a computed tensor | o = []; t = model[0].weight * 1 | t.register_hook(lambda g: o.append(1)) | (t.sum().backward(retain_graph=True), len(o))[1]
a computed tensor's gradient | t = torch.ones(3, requires_grad=True) * 1; t.retain_grad() | t.sum().backward(retain_graph=True) | t.grad
a computed tensor that retains its | t = torch.ones(3, requires_grad=True) * 1 | t.retain_grad() | t.retains_grad
a hook of a node | acc = model[0].weight.expand_as(model[0].weight).grad_fn.next_functions[0][0]; o = [] | acc.register_hook(lambda *a: o.append(1)) | len(o)
a nested tensor | t = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]) | t.add_(t + 1 if 0 else torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])) | [one.tolist() for one in t.unbind()]
a jagged tensor | t = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged) | t.values().add_(1) | t.values()
a conjugate view | b = torch.zeros(3, dtype=torch.complex64); t = b.conj() | b.add_(1j) | t.clone()
an mkldnn tensor | t = torch.ones(3).to_mkldnn() | t.add_(t) | t.to_dense()
a subclass with an attribute | exec("class T(torch.Tensor): pass", globals()); t = torch.zeros(3).as_subclass(T); t.log = [] | t.log.append(1); t.add_(1) | (t.log, t.tolist())
a tensor of two tensors | from torch.testing._internal.two_tensor import TwoTensor; t = TwoTensor(torch.zeros(3), torch.zeros(3)) | t.add_(1) | (t.a, t.b)
a gradient that is a view | w = nn.Linear(2, 2); b = torch.zeros(6); w.weight.grad = b[:4].view(2, 2) | w.weight.grad.add_(1) | b
a gradient that goes | w = nn.Linear(2, 2); w.weight.grad = torch.ones(2, 2) | w.weight.grad = None | w.weight.grad
a module without a file | import types; m = types.ModuleType('mine'); m.n = 0; m.log = [] | m.n += 1; m.log.append(1) | (m.n, m.log)
another dtype of a module | w = nn.Linear(2, 2) | w.double() | str(w.weight.dtype)
a parameter that becomes a buffer | w = nn.Linear(2, 2) | 'bias' in w._parameters and (w.__delattr__('bias'), w.register_buffer('bias', torch.zeros(2))) | 'bias' in w._parameters
parametrization that is added | w = nn.Linear(2, 2) | torch.nn.utils.parametrize.is_parametrized(w) or torch.nn.utils.parametrizations.weight_norm(w) | (type(w).__name__, sorted(n for n, _ in w.named_parameters()))
parametrization that is removed | w = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)) | torch.nn.utils.parametrize.is_parametrized(w) and torch.nn.utils.parametrize.remove_parametrizations(w, 'weight') | (type(w).__name__, sorted(n for n, _ in w.named_parameters()))
a pruning mask | import torch.nn.utils.prune; w = nn.Linear(2, 2); torch.nn.utils.prune.identity(w, 'weight') | w.weight_mask.zero_() | w.weight_mask
a dynamically quantized module | w = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)), {nn.Linear}); v = w[0].weight() | w[0].set_weight_bias(torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8), torch.ones(2)) | (w[0].weight().dequantize(), w[0].bias())
an observer | o = torch.ao.quantization.MinMaxObserver() | o(torch.randn(4) * 99) | (o.min_val, o.max_val)
a scripted module's statistics | o = torch.jit.script(nn.BatchNorm1d(3)) | o(torch.randn(4, 3)) | o.running_mean
a traced module's statistics | o = torch.jit.trace(nn.BatchNorm1d(3).train(), torch.ones(4, 3)) | o(torch.randn(4, 3)) | o.running_mean
a scripted module's number | exec("class S(nn.Module):\\n    n: int\\n    def __init__(self):\\n        super().__init__()\\n        self.n = 0\\n    def forward(self, x): return x", globals()); o = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)); o.extra = [] | o.extra.append(1) | o.extra
a GraphModule's attribute | o = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))) | o.n = 1 | hasattr(o, 'n')
a GraphModule's weights | o = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))) | o.get_parameter('0.weight').data.add_(1) | o.state_dict()
a graph that is edited | o = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))) | o.graph.placeholder('q') | len(o.graph.nodes)
a library of operators | o = torch.library.Library('kinds', 'FRAGMENT') | o.define(f'f{len(o._op_defs)}{os.urandom(4).hex()}(Tensor a) -> Tensor') | len(o._op_defs)
AveragedModel's count | o = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)) | o.update_parameters(model) | (int(o.n_averaged), o.module[0].weight)
SWALR | o = torch.optim.swa_utils.SWALR(optimizer, 0.5) | o.step() | (o.state_dict()['last_epoch'], optimizer.param_groups[0]['lr'])
a scheduler with a closure | log = []; o = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: (log.append(e), 0.5 ** e)[1]); log.clear() | o.step() | (o.last_epoch, log, optimizer.param_groups[0]['lr'])
a learning rate in a tensor | optimizer.param_groups[0]['lr'] = torch.tensor(0.1) | optimizer.param_groups[0]['lr'].mul_(0.5) | optimizer.param_groups[0]['lr']
an optimizer's defaults | pass | optimizer.defaults['lr'] = 9.0 | optimizer.defaults['lr']
an optimizer's state that is cleared | loss = model(x).sum(); loss.backward(); optimizer.step(); optimizer.zero_grad(); del loss | optimizer.state.clear() | len(optimizer.state)
a scaler's growth | o = torch.amp.GradScaler('cpu', init_scale=8.0) | o.scale(model(x).sum()); o._growth_tracker = 5 | (o._scale, o._growth_tracker)
a sampler's set | exec("class Own(torch.utils.data.Sampler):\\n    def __init__(self): self.epoch, self.seen = 0, []\\n    def __iter__(self): self.seen.append(1); self.epoch += 1; return iter([0])", globals()); o = torch.utils.data.DataLoader(range(3), sampler=Own()) | next(iter(o)) | (o.sampler.epoch, o.sampler.seen)
a dataset's cache | exec("class Own(torch.utils.data.Dataset):\\n    def __init__(self): self.seen = {}\\n    def __len__(self): return 4\\n    def __getitem__(self, i): self.seen[i] = 1; return i", globals()); o = torch.utils.data.DataLoader(Own(), batch_size=4) | next(iter(o)) | o.dataset.seen
a data pipe | from torch.utils.data.datapipes.iter import IterableWrapper; o = iter(IterableWrapper(range(10**5))) | next(o) | next(o)
a Sobol engine | o = torch.quasirandom.SobolEngine(2) | o.draw(1) | (o.num_generated, o.quasi)
a distribution's parameter | o = torch.distributions.Normal(torch.zeros(2), 1.0) | o.loc.add_(1) | o.loc
a parameter's grad_fn hook list | o = []; h = model[0].weight.register_post_accumulate_grad_hook(lambda p: o.append(1)) | pass | o
""",
)

family(
    "arrays, more",
    """
an array that is locked | a = np.zeros(3) | a.setflags(write=False) | a.flags.writeable
an array that is unlocked | a = np.zeros(3); a.flags.writeable = False | a.flags.writeable = True | a.flags.writeable
another dtype of an array | a = np.zeros(3) | a.dtype = np.int64 | a.dtype
strides of an array | a = np.arange(9.0)[:4] | a.strides = (16,) if a.strides == (8,) else a.strides | (a.strides, a.tolist())
fields with objects | a = np.zeros(2, dtype=[('n', float), ('o', object)]); a['o'][0] = [] | a['n'] += 1; a['o'][0].append(1) | (a['n'].tolist(), a['o'][0])
a field of objects, replaced | a = np.zeros(2, dtype=[('n', float), ('o', object)]) | a['o'][0] = 5 | a['o'].tolist()
a record array | a = np.rec.array([(1, 2.0)], names='n,v') | a.n += 1 | a.tolist()
an array of shape () | a = np.array(0.0) | a += 1 | a
an array with an attribute | exec("class A(np.ndarray): pass", globals()); a = np.zeros(3).view(A); a.log = [] | a.log.append(1); a += 1 | (a.log, a.tolist())
an array in a file | a = np.memmap('kinds.mm', dtype='f4', mode='w+', shape=(4,)) | a[0] += 1 | np.array(a)
dates | a = np.array(['2020-01-01'], dtype='M8[D]') | a += 1 | a.astype(str).tolist()
a masked array's fill value | a = np.ma.array([1.0, 2.0]) | a.fill_value = 5 | a.fill_value
""",
)

family(
    "libraries",
    """
an attrs class | import attr; exec("@attr.s(slots=True)\\nclass A:\\n    n = attr.ib(0)\\n    log = attr.ib(factory=list)", globals()); o = A() | o.n += 1; o.log.append(1) | (o.n, o.log)
a pydantic model | import pydantic; A = pydantic.create_model('A', n=(int, 0), log=(list, [])); o = A() | o.n += 1; o.log.append(1) | (o.n, o.log, o.model_fields_set)
a pydantic model's private | import pydantic; A = type('A', (pydantic.BaseModel,), {'_n': pydantic.PrivateAttr(default=0), '__module__': '__main__'}); o = A() | o._n += 1 | o._n
a traitlets object | import traitlets; A = type('A', (traitlets.HasTraits,), {'n': traitlets.Int(0), 'log': traitlets.List(), '__module__': '__main__'}); o = A() | o.n += 1; o.log.append(1) | (o.n, list(o.log))
a widget's value | import ipywidgets; o = ipywidgets.IntSlider() | o.value += 1 | o.value
an observer of a widget | import ipywidgets; o = ipywidgets.IntSlider(); seen = []; o.observe(lambda c: seen.append(1), 'value') | o.value += 1 | (o.value, seen)
a bar of tqdm | import tqdm; o = tqdm.tqdm(total=10**9, file=io.StringIO()) | o.update(1) | o.n
a bar of tqdm on stderr | import tqdm; o = tqdm.tqdm(total=10**9, disable=False, mininterval=10**6) | o.update(1); o.set_postfix(a=1, refresh=False) | (o.n, o.postfix)
an estimator | from sklearn.linear_model import SGDRegressor; o = SGDRegressor(random_state=0).partial_fit([[1.0]], [1.0]) | o.partial_fit([[2.0]], [5.0]) | (o.coef_, o.t_)
a tree's estimator | from sklearn.tree import DecisionTreeRegressor; o = DecisionTreeRegressor().fit([[1.0], [2.0]], [1.0, 2.0]) | o.tree_.value.fill(0) | o.tree_.value.tolist()
a scaler of scikit-learn | from sklearn.preprocessing import StandardScaler; o = StandardScaler().partial_fit([[1.0], [2.0]]) | o.partial_fit([[9.0]]) | (o.mean_, o.n_samples_seen_)
a sparse matrix of scipy | import scipy.sparse; o = scipy.sparse.csr_matrix(np.eye(3)) | o.data += 1 | o.toarray()
another shape of one | import scipy.sparse; o = scipy.sparse.lil_matrix((2, 2)) | o[0, 1] = 5 | o.toarray()
an image | from PIL import Image; o = Image.new('L', (4, 4)) | o.putpixel((0, 0), o.getpixel((0, 0)) + 1) | o.tobytes()
a metric | import torchmetrics; o = torchmetrics.MeanMetric() | o.update(torch.ones(1)) | (o.mean_value, o.weight, o._update_count)
a history of Hugging Face | from transformers import TrainerState; o = TrainerState() | o.global_step += 1; o.log_history.append({'a': 1}) | (o.global_step, o.log_history)
""",
)

family(
    "what holds others in C",
    """
a partial of a list's method | L = []; o = functools.partial(list.append, L) | o(1) | (L, o.args[0] is L)
a partial's list | L = []; o = functools.partial(lambda l: l.append(1), L) | o() | (L, o.args[0] is L)
a partial's keyword | D = {}; o = functools.partial(lambda d: d.update(a=1), d=D) | o() | (D, o.keywords['d'] is D)
a partial's own keywords | o = functools.partial(dict) | o.keywords['a'] = 1 | o.keywords
a partial's object | c = Counting(); o = functools.partial(Counting.step, c) | o() | (c.n, o.args[0] is c)
a partial's function | c = Counting(); o = functools.partial(c) | o() | (c.n, o.func is c)
a partial's attribute | o = functools.partial(len); o.log = [] | o.log.append(1) | o.log
a partial of a partial | L = []; o = functools.partial(functools.partial(list.extend, L), [1]) | o() | (L, o.args[0] is L)
another state of a partial | L = []; o = functools.partial(len, L) | o.__setstate__((max, ([1],), {}, None)) | (o.func is len, o.args[0] is L)
a partial in a list | L = []; o = [functools.partial(list.append, L)] | o[0](1) | (L, o[0].args[0] is L)
a subclass of partial | L = []; A = type('A', (functools.partial,), {}); o = A(list.append, L); o.n = 0 | o(1); o.n += 1 | (L, o.n, o.args[0] is L)
a partialmethod | L = []; A = type('A', (), {'add': functools.partialmethod(lambda s, l: l.append(1), L), '__module__': '__main__'}); o = A() | o.add() | L
a bound method of a list | L = []; o = L.append | o(1) | (L, o.__self__ is L)
a bound method | c = Counting(); o = types.MethodType(Counting.step, c) | o() | c.n
a method caller | L = []; o = operator.methodcaller('append', L); M = [] | o(M) | (L, len(M))
a method caller's list | L = []; o = operator.methodcaller('extend', L) | o(L); L.append(1) | L
a map over a function with state | c = Counting(); o = map(lambda i: (c.step(), i)[1], range(10**6)) | next(o) | c.n
a map of a list's method | L = []; o = map(L.append, range(10**6)) | next(o) | L
a filter with state | c = Counting(); o = filter(lambda i: (c.step(), True)[1], range(10**6)) | next(o) | c.n
a repeated list | L = []; o = itertools.repeat(L) | next(o).append(1) | L
a cycled list | L = []; o = itertools.cycle([L]) | next(o).append(1) | L
an iterator of lists | L = []; o = iter([L] * 10**4) | next(o).append(1) | L
a property's function | L = []; o = property(lambda s: L.append(1)) | o.fget(None) | L
a static method's function | L = []; o = staticmethod(lambda: L.append(1)) | o() | L
a class method's function | L = []; o = classmethod(lambda c: L.append(1)) | o.__func__(0) | L
a cached property | A = type('A', (), {'__module__': '__main__'}); A.p = functools.cached_property(lambda s: [1]); A.p.__set_name__(A, 'p'); o = A() | o.p.append(1) | vars(o)
a proxy of a dict | L = [{}]; o = types.MappingProxyType(L[0]) | L[0]["a"] = 1 | dict(o)
a proxy's list | o = types.MappingProxyType({'a': []}) | o['a'].append(1) | dict(o)
a view of keys | o = {'a': []}.values() | [l.append(1) for l in o] | list(o)
a view of bytes | o = memoryview(bytearray(4)) | o[0] = 7 | bytes(o)
a structure | A = type('A', (ctypes.Structure,), {'_fields_': [('n', ctypes.c_int)]}); o = A() | o.n += 1 | o.n
a structure's object | L = []; o = ctypes.py_object(L) | o.value.append(1) | L
a weak proxy | c = Counting(); o = weakref.proxy(c) | o.step() | c.n
a finalizer | L = []; c = Counting(); o = weakref.finalize(c, L.append, 1) | o() | (L, o.alive)
a cached function's list | L = []; o = functools.lru_cache(None)(lambda: L); o() | o().append(1) | L
what a cached function closes over | L = []; o = functools.lru_cache(0)(lambda: L.append(1)) | o() | L
what a cached function keeps | o = functools.lru_cache(None)(lambda i: [i]); o(0) | o(0).append(1) | o(0)
a single dispatch | o = functools.singledispatch(lambda v: 1) | o.register(Plain, lambda v: 2) | o(Plain())
a registered function's state | L = []; o = functools.singledispatch(lambda v: 1); o.register(Plain, lambda v: L.append(1)); p = Plain() | o(p) | L
a context | v = contextvars.ContextVar('v', default=0); o = contextvars.copy_context() | o.run(v.set, 1) | o.get(v)
a context's list | v = contextvars.ContextVar('v'); L = []; o = contextvars.copy_context(); o.run(v.set, L) | o[v].append(1) | L
a slice's list | L = []; o = slice(L) | o.start or o.stop.append(1) | L
an alias's argument | L = [1]; o = types.SimpleNamespace(a=(L,)) | o.a[0].append(1) | L
a super object | A = type('A', (Counting,), {}); c = A(); o = super(A, c) | o.step() | c.n
an exception group's list | L = []; o = ExceptionGroup('a', [ValueError(L)]) | o.exceptions[0].args[0].append(1) | L
a default factory with state | L = []; o = collections.defaultdict(lambda: L.append(1)) | o.default_factory() | L
a frozen set's object | c = Counting(); o = frozenset([c]) | [k.step() for k in o] | c.n
a method of a C object | L = collections.deque(); o = L.append | o(1) | list(L)
an awaitable's | L = []; o = (l.append(1) or 1 for l in [L] * 10**6) | next(o) | L
""",
)

family(
    "generators that are driven",
    """
sent to | exec("def g():\\n    s = 0\\n    while True:\\n        s += (yield s) or 0", globals()); o = g(); next(o) | o.send(1) | o.send(0)
sent to in an object | exec("def g():\\n    s = 0\\n    while True:\\n        s += (yield s) or 0", globals()); o = [g()]; next(o[0]) | o[0].send(1) | o[0].send(0)
thrown into | exec("def g():\\n    s = 0\\n    while True:\\n        try: yield s\\n        except KeyError: s += 1", globals()); o = g(); next(o) | o.throw(KeyError()) | next(o)
closed | exec("def g():\\n    for i in range(10**6): yield i", globals()); o = g(); next(o) | o.close() | next(o, None)
sent to through an alias | exec("def g():\\n    s = 0\\n    while True:\\n        s += (yield s) or 0", globals()); o = g(); next(o); o2 = o.send | o2(1) | o.send(0)
a coroutine | exec("@types.coroutine\\ndef w(): return (yield 1)\\nasync def g():\\n    s = 0\\n    while True: s += await w()", globals()); o = g(); o.send(None) | o.send(1) | o.cr_frame.f_locals['s']
a coroutine of generators | exec("@types.coroutine\\ndef g():\\n    s = 0\\n    while True: s += yield s", globals()); o = g(); o.send(None) | o.send(1) | o.send(0)
an asynchronous generator | exec("async def g():\\n    i = 0\\n    while True:\\n        i += 1\\n        yield i\\ndef drive():\\n    try: o.asend(None).send(None)\\n    except StopIteration: pass", globals()); o = g() | drive() | o.ag_frame.f_locals.get('i')
a context manager's generator | L = []; exec("@contextlib.contextmanager\\ndef g():\\n    L.append(1)\\n    yield\\n    L.append(2)", globals()); o = contextlib.ExitStack() | o.enter_context(g()) | L
""",
)

family(
    "what mirrors a file",
    """
a shelf | import shelve; p = tempfile.mktemp(); o = shelve.open(p); o['n'] = 0; o['log'] = [] | o['n'] += 1; o['log'] = (o['log'] + [7])[-200:] | (o['n'], o['log'])
dbm.dumb | import dbm.dumb; p = tempfile.mktemp(); o = dbm.dumb.open(p); o['n'] = b'0' | o['n'] = o['n'] + b'1' | o['n']
dbm | import dbm; p = tempfile.mktemp(); o = dbm.open(p, 'c'); o['n'] = b'0' | o['n'] = o['n'] + b'1' | o['n']
a zip file | import zipfile; o = zipfile.ZipFile(tempfile.mktemp(), 'w') | warnings.simplefilter('ignore') or o.writestr('a', 'b') | len(o.namelist())
a zip file that is read | import zipfile; p = tempfile.mktemp(); z = zipfile.ZipFile(p, 'w'); z.writestr('a', 'bbbb'); z.close(); o = zipfile.ZipFile(p) | o.read('a') | o.fp.tell() >= 0
a tar file | import tarfile; o = tarfile.open(tempfile.mktemp(), 'w'); i = tarfile.TarInfo('a') | o.addfile(i) | (len(o.getmembers()), o.offset)
gzip | o = gzip.open(tempfile.mktemp(), 'wb') | o.write(b'a') | o.tell()
bz2 | import bz2; o = bz2.open(tempfile.mktemp(), 'wb') | o.write(b'a') | o.tell()
lzma | import lzma; o = lzma.open(tempfile.mktemp(), 'wb') | o.write(b'a') | o.tell()
gzip into memory | b = io.BytesIO(); o = gzip.GzipFile(fileobj=b, mode='wb') | o.write(b'a') | o.tell()
a mailbox | import mailbox; o = mailbox.mbox(tempfile.mktemp()) | o.add('From: a\\n\\nb') and o.flush() | len(o)
sqlite3 | o = sqlite3.connect(tempfile.mktemp(), isolation_level=None); o.execute('create table t (a)') | o.execute('insert into t values (1)') | o.execute('select count(*) from t').fetchall()
a handler that writes a file | lg = logging.getLogger('fh'); p = tempfile.mktemp(); o = logging.FileHandler(p); lg.addHandler(o) | lg.error('a') | os.path.getsize(p)
a rotating handler | import logging.handlers; lg = logging.getLogger('rh'); p = tempfile.mktemp(); o = logging.handlers.RotatingFileHandler(p); lg.addHandler(o) | lg.error('a') | os.path.getsize(p)
a handler that collects records | import logging.handlers; lg = logging.getLogger('mh'); o = logging.handlers.MemoryHandler(10**6); lg.addHandler(o) | lg.info('a') or lg.error('a') | len(o.buffer)
a queue of records | import logging.handlers, queue; lg = logging.getLogger('qh'); lg.propagate = False; q = queue.Queue(); o = logging.handlers.QueueHandler(q); lg.addHandler(o) | lg.error('a') | q.qsize()
text of a handler | lg = logging.getLogger('sh'); lg.propagate = False; q = io.StringIO(); o = logging.StreamHandler(q); lg.addHandler(o) | lg.error('a') | q.getvalue()
a syntax tree | import ast; o = ast.parse('a = 1') | o.body.append(o.body[0]) | len(o.body)
a summary writer | from torch.utils.tensorboard import SummaryWriter; d = tempfile.mkdtemp(); o = SummaryWriter(d) | o.add_scalar('a', 1.0, 0); o.flush() | sum(os.path.getsize(os.path.join(d, f)) for f in os.listdir(d))
a csv writer | f = open(tempfile.mktemp(), 'w'); o = csv.writer(f) | o.writerow([1]) | f.tell()
a csv writer into memory | f = io.StringIO(); o = csv.writer(f) | o.writerow([1]) | f.getvalue()
a csv writer of dicts | f = open(tempfile.mktemp(), 'w'); o = csv.DictWriter(f, ['a']) | o.writerow({'a': 1}) | f.tell()
a csv reader | o = csv.reader(io.StringIO('1\\n' * 10**6)) | next(o) | next(o) and o.line_num
h5py | import h5py; o = h5py.File(tempfile.mktemp(), 'w'); o['a'] = 0 | o['a'][()] = o['a'][()] + 1 | int(o['a'][()])
a mapped array | o = np.memmap(tempfile.mktemp(), 'i4', 'w+', shape=4) | o[0] += 1 | o.tolist()
a buffered writer | f = open(tempfile.mktemp(), 'wb'); o = io.BufferedWriter(f.raw) | o.write(b'a') | o.tell()
a raw file | o = open(tempfile.mktemp(), 'wb', buffering=0) | o.write(b'a') | o.tell()
a spooled file | o = tempfile.SpooledTemporaryFile() | o.write(b'a') | o.tell()
a spooled file on disk | o = tempfile.SpooledTemporaryFile(); o.rollover() | o.write(b'a') | o.tell()
a temporary file | o = tempfile.NamedTemporaryFile() | o.write(b'a') | o.tell()
a temporary folder | o = tempfile.TemporaryDirectory() | o.cleanup() | os.path.exists(o.name)
a configuration parser's file | import configparser; o = configparser.ConfigParser(); o.add_section('a') | o.set('a', 'n', o.get('a', 'n', fallback='') + 'b') | dict(o['a'])
an own index of a file | exec("class Index:\\n    def __init__(s): s.f, s.at = open(tempfile.mktemp(), 'w+b'), {}\\n    def put(s, k, v): s.f.seek(0, 2); s.at[k] = s.f.tell(); s.f.write(v); s.f.flush()", globals()); o = Index(); o.put('a', b'1') | o.put('a', b'22') | dict(o.at)
a mapped file's position | o = mmap.mmap(-1, 4096) | o.read(1) | o.tell()
a file input | import fileinput; p = tempfile.mktemp(); open(p, 'w').write('a\\n' * 10**5); o = fileinput.input(p) | next(o) | o.lineno()
a pickler | b = io.BytesIO(); import pickle; o = pickle.Pickler(b) | o.dump([1]) | b.getvalue()
""",
)
