"""Kinds of state that belong to the whole process, as rows for `_kinds`: see there."""

# ruff: noqa: E501  (rows of a table)

from __future__ import annotations

FAMILIES = {
    "the operating system": """
a signal's handler | import signal; signal.signal(signal.SIGUSR1, signal.SIG_DFL) | signal.signal(signal.SIGUSR1, lambda *a: None) | str(signal.getsignal(signal.SIGUSR1))[:12]
Ctrl-C's handler | import signal | signal.signal(signal.SIGINT, lambda *a: None) | getattr(signal.getsignal(signal.SIGINT), '__name__', '')
a blocked signal | import signal | signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]) | sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
an alarm | import signal; signal.setitimer(signal.ITIMER_REAL, 0) | signal.setitimer(signal.ITIMER_REAL, 9999) | signal.getitimer(signal.ITIMER_REAL)[0] > 0
the locale | import locale | locale.setlocale(locale.LC_ALL, 'C') | locale.setlocale(locale.LC_ALL)
umask | old = os.umask(0); os.umask(0o022) | os.umask(0o077) | (lambda m: (os.umask(m), m)[1])(os.umask(0))
the time zone | import time | os.environ['TZ'] = 'Asia/Tokyo'; time.tzset() | time.tzname
a limit of resources | import resource | resource.setrlimit(resource.RLIMIT_NOFILE, (min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 900), resource.getrlimit(resource.RLIMIT_NOFILE)[1])) | resource.getrlimit(resource.RLIMIT_NOFILE)
os.putenv | os.unsetenv('ZQ') | os.putenv('ZQ', '1') | ctypes.CDLL(None).getenv(b'ZQ') != 0
a descriptor's position | d = os.open(sys.executable, os.O_RDONLY) | os.read(d, 1) | os.lseek(d, 0, 1)
a descriptor that stays open | many = len(os.listdir('/proc/self/fd')) | os.open(sys.executable, os.O_RDONLY) | len(os.listdir('/proc/self/fd'))
a pipe | import fcntl, termios; rd, wr = os.pipe() | os.write(wr, b'a') | __import__('select').select([rd], [], [], 0)[0]
a file that is written by its name | open('by_name.txt', 'w').close() | open('by_name.txt', 'a').write('a') | os.path.getsize('by_name.txt')
""",
    "the interpreter": """
sys.stdout | s = sys.stdout | exec("if sys.stdout is s: sys.stdout = io.StringIO()", globals()) | (sys.stdout is s, setattr(sys, 'stdout', s))[0]
sys.excepthook | h = sys.excepthook | sys.excepthook = lambda *a: None | sys.excepthook is h
sys.displayhook | h = sys.displayhook | sys.displayhook = lambda *a: None | sys.displayhook is h
sys.settrace | sys.settrace(None) | sys.settrace(lambda *a: None) | (sys.gettrace() is None, sys.settrace(None))[0]
sys.setprofile | sys.setprofile(None) | sys.setprofile(lambda *a: None) | (sys.getprofile() is None, sys.setprofile(None))[0]
the switch interval | sys.setswitchinterval(0.005) | sys.setswitchinterval(0.01) | sys.getswitchinterval()
digits of integers | sys.set_int_max_str_digits(4300) | sys.set_int_max_str_digits(5000) | sys.get_int_max_str_digits()
sys.meta_path | import types; finder = types.SimpleNamespace(find_spec=lambda *a: None); many = len(sys.meta_path) | sys.meta_path.append(finder) | len(sys.meta_path) - many
sys.path_hooks | pass | sys.path_hooks.append(len) | len in sys.path_hooks
a module in sys.modules | sys.modules.pop('zzz', None) | sys.modules['zzz'] = sys | 'zzz' in sys.modules
threading.excepthook | import threading; h = threading.excepthook | threading.excepthook = print | threading.excepthook is h
gc's callbacks | import gc; many = len(gc.callbacks) | gc.callbacks.append(lambda *a: None) | len(gc.callbacks) - many
gc.freeze | import gc; gc.unfreeze() | gc.freeze() | (gc.get_freeze_count() == 0, gc.unfreeze())[0]
atexit | import atexit; many = atexit._ncallbacks() | atexit.register(len) | atexit._ncallbacks() - many
csv's dialects | import csv; 'zz' in csv.list_dialects() and csv.unregister_dialect('zz') | csv.register_dialect('zz') | 'zz' in csv.list_dialects()
a call into C | import ctypes; lib = ctypes.CDLL(None); lib.srand(1); first = lib.rand(); lib.srand(1) | lib.rand() | lib.rand() == first
a call into C that is looked up | import ctypes; os.environ.pop('ZZC', None) | ctypes.CDLL(None).prctl(15, b'zzname', 0, 0, 0) | open('/proc/self/comm').read()
copyreg | import copyreg; copyreg.dispatch_table.pop(Plain, None) | copyreg.pickle(Plain, lambda o: (Plain, ())) | Plain in copyreg.dispatch_table
a codec's errors | import codecs; codecs.register_error('zz', codecs.strict_errors) | codecs.register_error('zz', codecs.ignore_errors) | codecs.lookup_error('zz') is codecs.strict_errors
tempfile.tempdir | tempfile.tempdir = None | tempfile.tempdir = '/var/tmp' | tempfile.tempdir
the first weekday | import calendar; calendar.setfirstweekday(0) | calendar.setfirstweekday(6) | calendar.firstweekday()
sockets' time-out | import socket; socket.setdefaulttimeout(None) | socket.setdefaulttimeout(5.0) | socket.getdefaulttimeout()
decimal's DefaultContext | decimal.DefaultContext.prec = 28 | decimal.DefaultContext.prec += 1 | decimal.DefaultContext.prec
the start method | import multiprocessing as mp; mp.set_start_method(None, force=True) | mp.set_start_method('spawn', force=True) | mp.get_start_method(allow_none=True)
asyncio's policy | import asyncio; asyncio.set_event_loop_policy(None); P = type('P', (asyncio.DefaultEventLoopPolicy,), {}) | asyncio.set_event_loop_policy(P()) | type(asyncio.get_event_loop_policy()).__name__
tracemalloc | import tracemalloc | tracemalloc.start() | (tracemalloc.is_tracing(), tracemalloc.stop())[0]
showwarning | w = warnings.showwarning | warnings.showwarning = print | warnings.showwarning is w
an ABC's registration | import collections.abc | collections.abc.Sequence.register(Plain) | issubclass(Plain, collections.abc.Sequence)
""",
    "by a helper function": """
a descriptor's position | d = os.open(sys.executable, os.O_RDONLY); exec("def up(): os.read(d, 1)", globals()) | up() | os.lseek(d, 0, 1)
a descriptor's position, by a name of its own | d = os.open(sys.executable, os.O_RDONLY); rd = os.read | rd(d, 1) | os.lseek(d, 0, 1)
a descriptor's position, by lseek | d = os.open(sys.executable, os.O_RDONLY) | os.lseek(d, 99, 0) | os.lseek(d, 0, 1)
a descriptor that is written to | d = os.open(tempfile.mktemp(), os.O_RDWR + os.O_CREAT); exec("def up(): os.write(d, b'a')", globals()) | up() | (os.lseek(d, 0, 1), os.fstat(d).st_size)
atexit | import atexit; many = atexit._ncallbacks(); exec("def up(): atexit.register(len)", globals()) | up() | atexit._ncallbacks() - many
atexit, by a name of its own | import atexit; many = atexit._ncallbacks(); at = atexit.register | at(len) | atexit._ncallbacks() - many
a codec's errors | import codecs; codecs.register_error('zz', codecs.strict_errors); exec("def up(): codecs.register_error('zz', codecs.ignore_errors)", globals()) | up() | codecs.lookup_error('zz') is codecs.strict_errors
a codec's errors, by a name of its own | import codecs; codecs.register_error('zz', codecs.strict_errors); put = codecs.register_error | put('zz', codecs.ignore_errors) | codecs.lookup_error('zz') is codecs.strict_errors
a finalizer | k = Plain(); exec("def up(): weakref.finalize(k, str)", globals()) | up() | any(i.func is str for i in weakref.finalize._registry.values())
a finalizer of a list's method | k = Plain(); L = []; exec("def up(): weakref.finalize(k, L.append, 1)", globals()) | up() | any(getattr(i.func, '__self__', 0) is L for i in weakref.finalize._registry.values())
a format of archives | import shutil; exec("def up(): 'zz' in shutil._ARCHIVE_FORMATS or shutil.register_archive_format('zz', print, description='z')", globals()) | up() | [n for n, _ in shutil.get_archive_formats()]
a format to unpack | import shutil; exec("def up(): 'zz' in shutil._UNPACK_FORMATS or shutil.register_unpack_format('zz', ['.zz'], print)", globals()) | up() | [n for n, *_ in shutil.get_unpack_formats()]
a type of files | import mimetypes; mimetypes.init(); exec("def up(): mimetypes.add_type('a/zz', '.zz')", globals()) | up() | (mimetypes.guess_type('q.zz'), mimetypes.guess_extension('a/zz'))
a common type of files | import mimetypes; mimetypes.init(); exec("def up(): mimetypes.add_type('a/zz', '.zz', strict=False)", globals()) | up() | (mimetypes.guess_type('q.zz', False), mimetypes.guess_extension('a/zz', False))
a type of files before any is asked for | import mimetypes; mimetypes._db = None; mimetypes.inited = False; mimetypes._default_mime_types() | mimetypes.add_type('a/zz', '.zz') | mimetypes.guess_type('q.zz')
an attribute of sys.stderr | exec("def up(): sys.stderr.zz = 1", globals()) | up() | hasattr(sys.stderr, 'zz')
an attribute of sys.__stdout__ that is there | sys.__stdout__.zz = 0; exec("def up(): sys.__stdout__.zz += 1", globals()) | up() | sys.__stdout__.zz
a seed sequence | o = np.random.SeedSequence(1) | o.spawn(2) | (o.n_children_spawned, o.spawn(1)[0].generate_state(2))
a generator that spawns | o = np.random.default_rng(1) | o.spawn(1) | o.bit_generator.seed_seq.n_children_spawned
a context variable without a value | o = contextvars.ContextVar('o'); exec("def up(): o.set(1)", globals()) | up() | o.get(None)
a context variable with a default | o = contextvars.ContextVar('o', default=0); exec("def up(): o.set(1)", globals()) | up() | o.get()
""",
    "logging": """
a logger's handler | lg = logging.getLogger('mine'); lg.handlers[:] = [] | lg.addHandler(logging.NullHandler()) | len(lg.handlers)
the root's handler | logging.root.handlers[:] = [] | logging.getLogger().addHandler(logging.NullHandler()) | len(logging.root.handlers)
a logger's filter | lg = logging.getLogger('mine'); lg.filters[:] = [] | lg.addFilter(lambda r: True) | len(lg.filters)
a logger's propagation | logging.getLogger('mine').propagate = True | logging.getLogger('mine').propagate = False | logging.getLogger('mine').propagate
a new logger's handler | logging.root.manager.loggerDict.pop('late', None) | logging.getLogger('late').addHandler(logging.NullHandler()) | len(logging.getLogger('late').handlers)
logging.disable | logging.disable(0) | logging.disable(10) | logging.root.manager.disable
a level's name | pass | logging.addLevelName(7, 'SEVEN') | logging.getLevelName(7)
captured warnings | logging.captureWarnings(False) | logging.captureWarnings(True) | logging._warnings_showwarning is None
""",
    "libraries that are patched": """
F.relu | import torch.nn.functional as F; f = F.relu | F.relu = lambda x, inplace=False: torch.relu(x) | F.relu is f
nn.Linear.forward | import torch.nn.functional as F; f = nn.Linear.forward | nn.Linear.forward = lambda s, x: F.linear(x, s.weight, s.bias) | nn.Linear.forward is f
nn.Module.train | f = nn.Module.train | setattr(nn.Module, 'train', lambda s, mode=True: s) | nn.Module.train is f
torch.matmul | f = torch.matmul | torch.matmul = lambda a, b: a @ b | torch.matmul is f
torch.Tensor.mine | pass | torch.Tensor.mine = lambda s: s | hasattr(torch.Tensor, 'mine')
an init function of a library's | f = nn.init.ones_ | nn.init.ones_ = len | nn.init.ones_ is f
by a name that is computed | f = nn.functional.gelu | setattr(nn.functional, ''.join(('ge', 'lu')), lambda x: x) | nn.functional.gelu is f
np.mean | f = np.mean | np.mean = lambda a: 0 | np.mean is f
print | import builtins; f = builtins.print | builtins.print = lambda *a: None | builtins.print is f
a new builtin | import builtins; builtins.__dict__.pop('zz', None) | builtins.zz = 1 | hasattr(builtins, 'zz')
a class attribute of a library's | vars(nn.Linear).get('zz') and delattr(nn.Linear, 'zz') | nn.Linear.zz = 1 | 'zz' in vars(nn.Linear)
its list | nn.Linear.zc = [] | nn.Linear.zc.append(1) | list(nn.Linear.zc)
a library's number | import json; json.decoder.zz = 0 | json.decoder.zz += 1 | json.decoder.zz
""",
    "torch's switches": """
MHA's fast path | torch.backends.mha.set_fastpath_enabled(True) | torch.backends.mha.set_fastpath_enabled(False) | torch.backends.mha.get_fastpath_enabled()
nnpack | torch.backends.nnpack.set_flags(True) | torch.backends.nnpack.set_flags(False) | torch._C._get_nnpack_enabled()
swap_module_params | torch.__future__.set_swap_module_params_on_conversion(False) | torch.__future__.set_swap_module_params_on_conversion(True) | torch.__future__.get_swap_module_params_on_conversion()
safe globals | torch.serialization.clear_safe_globals() | torch.serialization.add_safe_globals([Plain]) | len(torch.serialization.get_safe_globals())
checks of distributions | torch.distributions.Distribution.set_default_validate_args(True) | torch.distributions.Distribution.set_default_validate_args(False) | torch.distributions.Distribution._validate_args
the sharing strategy | torch.multiprocessing.set_sharing_strategy('file_descriptor') | torch.multiprocessing.set_sharing_strategy('file_system') | torch.multiprocessing.get_sharing_strategy()
torch.hub's folder | torch.hub.set_dir('/tmp/a') | torch.hub.set_dir('/tmp/b') | torch.hub.get_dir()
a hook of all modules | m = nn.modules.module; m._global_forward_hooks.clear() | m.register_module_forward_hook(lambda *a: None) | (len(m._global_forward_hooks), m._global_forward_hooks.clear())[0]
a backward hook of all modules | m = nn.modules.module; m._global_backward_hooks.clear() | m.register_module_full_backward_hook(lambda *a: None) | (len(m._global_backward_hooks), m._global_backward_hooks.clear())[0]
a hook of all optimizers | m = sys.modules['torch.optim.optimizer']; m._global_optimizer_post_hooks.clear() | m.register_optimizer_step_post_hook(lambda *a: None) | (len(m._global_optimizer_post_hooks), m._global_optimizer_post_hooks.clear())[0]
hooks of saved tensors | pass | torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t) | (torch._C._autograd._top_saved_tensors_default_hooks(True) is None, [torch._C._autograd._pop_saved_tensors_default_hooks() for _ in range(9) if torch._C._autograd._top_saved_tensors_default_hooks(True)])[0]
an operator of torch.library | import time; LB = torch.library.Library('zzlib', 'FRAGMENT') | LB.define(f'f{time.perf_counter_ns()}(Tensor a) -> Tensor') | sum(d[:5] == 'zzlib' for d in torch.library._defs)
Dynamo's configuration | import torch._dynamo as dy; dy.config.verbose = False | dy.config.verbose = True | dy.config.verbose
a parametrization's cache | import torch.nn.utils.parametrize as P; P._cache.clear() | P._cache.update({1: 2}) | dict(P._cache)
numpy's error handler | np.seterrcall(None) | np.seterrcall(print) | np.geterrcall() is None
numpy's buffers | np.setbufsize(8192) | np.setbufsize(16384) | np.getbufsize()
matplotlib's parameters | import matplotlib; matplotlib.rcParams['lines.linewidth'] = 1.5 | matplotlib.rcParams['lines.linewidth'] = 9.0 | matplotlib.rcParams['lines.linewidth']
""",
}
