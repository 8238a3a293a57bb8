"""Each kernel that the source calls by itself, past torch's functions, with what CUDA's asks of its arguments.

torch's functions see to what a kernel wants; who calls it himself must. What stands here was read, in torch's sources
and headers, and not run on a GPU. A call that is added, or a new torch, fails until it was read again.
"""

import ast
from collections import Counter
from pathlib import Path

import torch

from tests.test_layers import PACKAGE, SOURCE

HELD_AGAINST = "2.13"
FAKE_ONLY = ("simulation", "model/compiled")  # their calls meet fake tensors, which have no kernel
NAMESPACE = "torch.ops.aten"
KERNELS = ("batch_norm_", "native_", "cudnn_", "miopen_", "convolution")  # of the names of `torch` itself

CALLS = {
    ("ranks/collectives.py", "_unsafe_view", 1): "no kernel; needs strides that allow the view",
    ("spatial/rules/channel_statistics.py", "_unsafe_view", 1): "no kernel; needs strides that allow the view",
    ("spatial/rules/channel_statistics.py", "batch_norm_update_stats", 2):
        "asked on the CPU alone; CUDA's also updates running statistics, which are None here",
    ("spatial/rules/channel_statistics.py", "mse_loss", 1):
        "pointwise: any strides, broadcast by the iterator; both of one dtype",
    ("spatial/rules/channel_statistics.py", "native_batch_norm", 2):
        "in evaluation the running statistics must be there, and be float32 where x is 16 bit; weight and bias alike. "
        "A map of 2^31 elements and more takes the slow kernel",
    ("model/sharding/values.py", "_local_scalar_dense", 1): "no call: DTensor's table is told of a function for it",
    ("model/sharding/random.py", "*", 1): "no call: DTensor's table is told of a function for those that draw",
    ("model/sharding/random.py", "bernoulli", 1): "no call: which of them reads its operand",
    ("spatial/tensor.py", "_to_copy", 1): "no call: what torch.as_tensor asks for is recognized, and goes on",
    ("spatial/whole_operands.py", "convolution_backward", 2): "no call: which of its operands it reads",
    ("spatial/rules/operators.py", "_assert_tensor_metadata", 1): "no kernel; of a tensor without memory",
    ("spatial/rules/channel_statistics.py", "native_batch_norm_backward", 2):
        "asserts save_mean and save_invstd unless x is contiguous with several channels: both are given, off the CPU. "
        "Gradient and x of one layout and dtype, here that of the weight",
    ("spatial/rules/narrow_bf16.py", "convolution", 2):
        "input and weight of one dtype and device, which autocast does not see to here; the layout "
        "is chosen by the strides of both, which are made contiguous in it; no dim without rows. Transposed: output "
        "padding smaller than stride or dilation",
    ("spatial/rules/narrow_bf16.py", "convolution_backward", 2):
        "the same of the gradient; bias_sizes wherever a bias' gradient is asked for; no input without elements",
    ("spatial/rules/norm_kernels.py", "batch_norm_backward_elemt", 1):
        "counts int32; weight None or of the dtype of the statistics; gradient and x of one layout",
    ("spatial/rules/norm_kernels.py", "batch_norm_backward_reduce", 1):
        "gradient and x of one layout, channels_last or contiguous; sums in float32 or wider",
    ("spatial/rules/norm_kernels.py", "batch_norm_elemt", 1):
        "weight and bias of the dtype of x, or of that of the statistics; x in one piece",
    ("spatial/rules/norm_kernels.py", "batch_norm_gather_stats_with_counts", 1):
        "counts of the dtype of the running mean, else of the first argument, in 32 bit or wider, and none of them 0",
    ("spatial/rules/norm_kernels.py", "batch_norm_stats", 1):
        "x with elements, channels_last or contiguous; statistics in float32 or wider",
    ("spatial/rules/convolution.py", "_unsafe_view", 1): "no kernel; of the same shape",
    ("spatial/rules/grid_sample.py", "_unsafe_view", 2): "no kernel; of sums in one piece, which no node keeps",
    ("spatial/rules/normalization.py", "_unsafe_view", 1): "no kernel; needs strides that allow the view",
    ("spatial/rules/pooling.py", "avg_pool*d_backward", 1):
        "reads shape and layout of `self`, not its values; adds by atomics where windows of a volume overlap",
    ("spatial/rules/pooling.py", "max_pool*d_with_indices", 1):
        "channels_last and contiguous both; indices count in the rows that are given; floating point alone",
    ("spatial/rules/pooling.py", "max_pool*d_with_indices_backward", 1):
        "reads shape and layout of `self`, not its values; indices in the layout of the output, as torch 2.13 makes "
        "them so itself; adds by atomics where windows overlap, so sums may differ in the last bit",
    ("spatial/rules/scattering.py", "index_put", 2):
        "indices int64, or a mask, which makes the host wait; with accumulate they are sorted, so sums repeat; "
        "without it and with equal indices any of the values wins",
    ("spatial/rules/scattering.py", "index_put_", 1): "the same; in place, so no two elements of `own` share memory",
    ("spatial/rules/upsampling.py", "upsample_bilinear2d", 1):
        "any strides, made contiguous or channels_last; sizes all positive; weights are computed in float32 or wider",
    ("spatial/rules/upsampling.py", "upsample_bilinear2d_backward", 1):
        "adds by atomics, so sums may differ in the last bit, and raises where determinism is asked for: then it is "
        "not called off the CPU; a gradient of the sizes and dtype of the output",
    ("spatial/rules/upsampling.py", "upsample_linear1d", 1): "the same, contiguous",
    ("spatial/rules/upsampling.py", "upsample_linear1d_backward", 1): "the same, contiguous",
    ("spatial/rules/upsampling.py", "upsample_trilinear3d", 1): "the same, contiguous",
    ("spatial/rules/upsampling.py", "upsample_trilinear3d_backward", 1): "the same, contiguous",
    ("spatial/rules/unpooling.py", "_unsafe_view", 2): "no kernel; needs strides that allow the view",
}  # fmt: skip


def direct_calls(source: str) -> Counter[str]:
    """The kernels that a source names, each as often as it does; "*" stands for what is filled in."""
    tree = ast.parse(source)
    names = {NAMESPACE} | {
        target.id
        for node in ast.walk(tree) if isinstance(node, ast.Assign) and ast.unparse(node.value) == NAMESPACE
        for target in node.targets if isinstance(target, ast.Name)
    }  # fmt: skip
    found: Counter[str] = Counter()
    calls: dict[str, str] = {}  # names that stand for a kernel's own call, and its name
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id)], value=ast.Attribute(ast.Attribute(kernel, "default"), "_op")):
                assert isinstance(kernel, ast.Attribute)
                calls[id] = kernel.attr
                found[kernel.attr] -= 1  # which is no call yet
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in calls:
            found[calls[node.id]] += 1
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner in names or (owner == "torch" and node.attr.startswith(KERNELS)):
                found[node.attr] += 1
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and ast.unparse(node.args[0]) in names:
            found[_pattern(node.args[1])] += 1
    return found


def _pattern(name: ast.expr) -> str:
    if isinstance(name, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in name.values)
    return str(ast.literal_eval(name)) if isinstance(name, ast.Constant) else "*"


def test_each_direct_call_was_held_against_cudas_kernel() -> None:
    root = Path(SOURCE) / PACKAGE
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    found = {
        (path, name, times)
        for path, file in paths.items() if not path.startswith(FAKE_ONLY)
        for name, times in direct_calls(file.read_text()).items()
    }  # fmt: skip
    assert found - CALLS.keys() == set(), "read CUDA's kernel, and say here what it asks of its arguments"
    assert CALLS.keys() - found == set(), "is called no more so often"


def test_they_were_read_in_this_torch() -> None:
    assert torch.__version__.startswith(HELD_AGAINST), "read the kernels of CALLS again"


def test_the_check_can_fail() -> None:
    assert direct_calls("x = torch.ops.aten.relu(torch.relu(y))") == {"relu": 1}
    assert direct_calls("_a = torch.ops.aten\ndef f(): return _a.mm(_a.mm(x, y), z)") == {"mm": 2}
    assert direct_calls("_mm = torch.ops.aten.mm.default._op\ndef f(): return _mm(_mm(x, y), z)") == {"mm": 2}
    assert direct_calls("pool = getattr(torch.ops.aten, f'max_pool{n}d')") == {"max_pool*d": 1}
    assert direct_calls("getattr(torch.ops.aten, name)(x)") == {"*": 1}
    assert direct_calls("torch.batch_norm_stats(x, 1e-5); torch.native_layer_norm") == {
        "batch_norm_stats": 1, "native_layer_norm": 1,
    }  # fmt: skip
    assert direct_calls("torch.matmul(x, y)") == {}
