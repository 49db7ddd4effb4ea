"""Kinds of state of tensors beside their values, as rows for `_kinds`: see there."""

# ruff: noqa: E501  (rows of a table)

from __future__ import annotations

FAMILIES = {
    "memory that is given back": """
by the step | t = torch.arange(9.0) | t.untyped_storage().resize_(0) | t.untyped_storage().tolist()
by the step, of one in a dict | o = {'t': torch.arange(9.0)} | o['t'].untyped_storage().resize_(0) | o['t'].untyped_storage().tolist()
before, taken and given back by the step | t = torch.arange(9.0); t.untyped_storage().resize_(0) | t.untyped_storage().resize_(36); t.fill_(1); t.untyped_storage().resize_(0) | t.untyped_storage().tolist()
before, taken by the step | t = torch.arange(9.0); t.untyped_storage().resize_(0) | t.untyped_storage().resize_(36); t.fill_(1) | t.untyped_storage().tolist()
before, and left alone | t = torch.arange(9.0); t.untyped_storage().resize_(0) | t.shape | (tuple(t.shape), t.untyped_storage().tolist())
in part by the step | t = torch.arange(9.0) | t.untyped_storage().resize_(12) | t.untyped_storage().tolist()
in part before | t = torch.arange(9.0); t.untyped_storage().resize_(12) | t.untyped_storage().fill_(7) | t.untyped_storage().tolist()
in part before, wholly by the step | t = torch.arange(9.0); t.untyped_storage().resize_(12) | t.untyped_storage().resize_(0) | t.untyped_storage().tolist()
more is taken | t = torch.arange(9.0) | t.untyped_storage().resize_(80) | t.untyped_storage().tolist()
of a view | b = torch.arange(9.0); t = b[2:5] | len(b); t.untyped_storage().resize_(0) | b.untyped_storage().tolist()
of a view whose whole the step does not know | b = torch.arange(9.0); t = b[2:5] | t.untyped_storage().resize_(0) | b.untyped_storage().tolist()
of two views | b = torch.arange(9.0); t = b[:5]; a = b[5:] | a.shape; t.untyped_storage().resize_(0) | b.untyped_storage().tolist()
of an expanded one | t = torch.ones(1).expand(5) | t.untyped_storage().resize_(0) | t.untyped_storage().tolist()
of a transposed one | t = torch.arange(6.0).view(2, 3).t() | t.untyped_storage().resize_(0) | (t.stride(), t.untyped_storage().tolist())
of bf16 | t = torch.ones(5, dtype=torch.bfloat16) | t.untyped_storage().resize_(0) | t.untyped_storage().tolist()
of complex numbers | t = torch.ones(5, dtype=torch.complex64) | t.untyped_storage().resize_(0) | t.untyped_storage().tolist()
of a subclass | t = torch.ones(5).as_subclass(type('T', (torch.Tensor,), {})) | t.untyped_storage().resize_(0) | t.untyped_storage().tolist()
of an inference tensor | t = torch.inference_mode()(torch.ones)(5) | t.untyped_storage().resize_(0) | t.untyped_storage().tolist()
of an inference tensor, before | t = torch.inference_mode()(torch.ones)(5); t.untyped_storage().resize_(0) | t.untyped_storage().resize_(20) | t.untyped_storage().tolist()
of a sparse one's values | t = torch.eye(3).to_sparse().coalesce() | t._values().untyped_storage().resize_(0) | t._values().untyped_storage().tolist()
of a sparse one's values, before | t = torch.eye(3).to_sparse().coalesce(); t._values().untyped_storage().resize_(0) | t.shape | t._values().untyped_storage().tolist()
of a nested one | t = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) | t.untyped_storage().resize_(0) | t.untyped_storage().tolist()
of a storage that the step has | t = torch.ones(5); o = t.untyped_storage() | o.resize_(0) | t.untyped_storage().tolist()
of a parameter | z = nn.Parameter(torch.ones(5)) | z.untyped_storage().resize_(0) | z.untyped_storage().tolist()
of a parameter, before | z = nn.Parameter(torch.ones(5)); z.untyped_storage().resize_(0) | z.untyped_storage().resize_(20); z.data.fill_(2); z.untyped_storage().resize_(0) | z.untyped_storage().tolist()
of the model's, and back | k = model[0].weight.detach().clone() | p = model[0].weight; p.untyped_storage().resize_(0); p.untyped_storage().resize_(4 * k.numel()); p.data.copy_(k) | model.state_dict()
of the model's buffer | model = Net(); optimizer = torch.optim.SGD(model.parameters()) | model.seen.untyped_storage().resize_(0) | model.seen.untyped_storage().tolist()
of the model's buffer, before | model = Net(); optimizer = torch.optim.SGD(model.parameters()); model.seen.untyped_storage().resize_(0) | model.seen.untyped_storage().resize_(8) | model.seen.untyped_storage().tolist()
of a gradient | z = nn.Parameter(torch.ones(5)); z.grad = torch.ones(5) | z.grad.untyped_storage().resize_(0) | z.grad.untyped_storage().tolist()
of a gradient, before | z = nn.Parameter(torch.ones(5)); z.grad = torch.ones(5); z.grad.untyped_storage().resize_(0) | z.grad.shape | z.grad.untyped_storage().tolist()
of an optimizer's state | z = nn.Parameter(torch.ones(5)); o = torch.optim.Adam([z]); z.sum().backward(); o.step() | o.state[z]['exp_avg'].untyped_storage().resize_(0) | o.state[z]['exp_avg'].untyped_storage().tolist()
of an optimizer's state, before | z = nn.Parameter(torch.ones(5)); o = torch.optim.Adam([z]); z.sum().backward(); o.step(); o.state[z]['exp_avg'].untyped_storage().resize_(0) | len(o.state) | o.state[z]['exp_avg'].untyped_storage().tolist()
of what a rand_like is asked of | t = torch.ones(5); t.untyped_storage().resize_(0) | torch.rand_like(t) | t.untyped_storage().tolist()
of what is returned | t = torch.ones(5); t.untyped_storage().resize_(0); o = [] | o.append(t) | (len(o), t.untyped_storage().tolist())
""",
    "graphs of before": """
written into in place | w = torch.ones(3, requires_grad=True); y = w * 2 | y.mul_(1.5) | (y.tolist(), torch.autograd.grad(y.sum(), w, retain_graph=True)[0])
written into through an attribute | w = torch.ones(3, requires_grad=True); o = Plain(); o.y = w * 2 | o.y.mul_(1.5) | (o.y.tolist(), torch.autograd.grad(o.y.sum(), w, retain_graph=True)[0])
written into in a list | w = torch.ones(3, requires_grad=True); o = [w * 2] | o[0].mul_(1.5) | torch.autograd.grad(o[0].sum(), w, retain_graph=True)[0]
written into in a dict | w = torch.ones(3, requires_grad=True); o = {'y': w * 2} | o['y'].mul_(1.5) | torch.autograd.grad(o['y'].sum(), w, retain_graph=True)[0]
written into by a function that is called | w = torch.ones(3, requires_grad=True); y = w * 2; exec("def up(): y.mul_(1.5)", globals()) | up() | torch.autograd.grad(y.sum(), w, retain_graph=True)[0]
written into a view | w = torch.ones(3, requires_grad=True); y = w * 2; v = y[:1] | v.mul_(1.5) | torch.autograd.grad(y.sum(), w, retain_graph=True)[0]
the value that a graph has saved, written | w = torch.ones(3, requires_grad=True); c = torch.ones(3); y = w * c | c.add_(1) | torch.autograd.grad(y.sum(), w, retain_graph=True)[0]
a parameter that a graph has saved, trained | y = model(x).pow(2).mean() | pass | (y.backward(retain_graph=True), model[0].weight.grad.tolist())
a gradient behind it | w = torch.ones(3, requires_grad=True); exec("def make(w):\\n    return w * 2", globals()); y = make(w) | y.sum().backward(retain_graph=True) | w.grad
a gradient far behind it | w = torch.ones(3, requires_grad=True); y = w * 2; exec("for _ in range(500): y = y + 1", globals()) | y.sum().backward(retain_graph=True) | w.grad
a gradient behind one in a list | w = torch.ones(3, requires_grad=True); o = [w * 2] | o[0].sum().backward(retain_graph=True) | w.grad
a gradient behind one in an object | w = torch.ones(3, requires_grad=True); o = Plain(); o.y = w * 2 | o.y.sum().backward(retain_graph=True) | w.grad
a gradient that lay there before | w = torch.ones(3, requires_grad=True); w.grad = torch.ones(3); y = w * 2 | y.sum().backward(retain_graph=True) | w.grad
a hook on a leaf behind it | o = []; w = torch.ones(3, requires_grad=True); h = w.register_hook(lambda g: o.append(1)); y = w * 2 | y.sum().backward(retain_graph=True) | (o, w.grad)
freed by a backward pass | w = torch.ones(3, requires_grad=True); y = (w * 2).exp().sum(); exec("def go():\\n    try: y.backward()\\n    except RuntimeError: pass\\ndef alive():\\n    try: return bool(torch.autograd.grad(y, w, retain_graph=True))\\n    except RuntimeError: return False", globals()) | go() | alive()
freed by torch.autograd.grad | w = torch.ones(3, requires_grad=True); y = (w * 2).exp().sum(); exec("def go():\\n    try: torch.autograd.grad(y, w)\\n    except RuntimeError: pass\\ndef alive():\\n    try: return bool(torch.autograd.grad(y, w, retain_graph=True))\\n    except RuntimeError: return False", globals()) | go() | alive()
retain_grad | w = torch.ones(3, requires_grad=True); y = w * 2 | y.retain_grad() | y.retains_grad
a hook on what is no leaf | w = torch.ones(3, requires_grad=True); y = w * 2 | y.register_hook(lambda g: g * 2) | torch.autograd.grad(y.sum(), w, retain_graph=True)[0]
a hook on its node | w = torch.ones(3, requires_grad=True); y = w * 2 | y.grad_fn.register_hook(lambda i, o: (i[0] * 2, None)) | torch.autograd.grad(y.sum(), w, retain_graph=True)[0]
detached in place | w = torch.ones(3, requires_grad=True); y = w * 2 | y.detach_() | y.requires_grad
requires_grad_ of a leaf | t = torch.ones(3) | t.requires_grad_() | (t.requires_grad, t.is_leaf)
a view of a leaf, without gradients | w = torch.ones(3, requires_grad=True); v = w[:1] | torch.no_grad()(v.mul_)(2) | (w.tolist(), torch.autograd.grad(v.sum(), w, retain_graph=True)[0])
what a Function of the user's counts | exec("class Sq(torch.autograd.Function):\\n    @staticmethod\\n    def forward(ctx, x):\\n        ctx.n = 0\\n        ctx.save_for_backward(x)\\n        return x * x\\n    @staticmethod\\n    def backward(ctx, g):\\n        ctx.n += 1\\n        return 2 * g * ctx.saved_tensors[0]", globals()); w = torch.ones(3, requires_grad=True); y = Sq.apply(w) | y.sum().backward(retain_graph=True) | (y.grad_fn.n, w.grad)
what its list keeps | exec("class Li(torch.autograd.Function):\\n    @staticmethod\\n    def forward(ctx, x):\\n        ctx.log = []\\n        return x * 2\\n    @staticmethod\\n    def backward(ctx, g):\\n        ctx.log.append(1)\\n        return 2 * g", globals()); w = torch.ones(3, requires_grad=True); y = Li.apply(w) + 1 | y.sum().backward(retain_graph=True) | (y.grad_fn.next_functions[0][0].log, w.grad)
a leaf that becomes a part of a graph | t = torch.zeros(3) | t.is_leaf and t.add_(model(x).sum()) | (t.is_leaf, t.requires_grad, t.tolist())
a sum that goes on | o = Plain(); o.total = model(x).sum() | o.total = o.total + model(x).sum() | (o.total.grad_fn.name(), o.total.tolist())
""",
}
