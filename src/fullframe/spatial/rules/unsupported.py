"""What has no exact rule, by the reason it has none; a function that is in no rule and not here fails a test.

A name covers all functions so called; those among them that have a rule are not refused.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.rules.registry import setters

# Why, and what to do.
OF_SPARSE = "an operand is sparse, or else not strided", "Give it dense, or gather first with .full()."
INTO_WHOLE = (
    "A tensor made to be filled, as by torch.zeros(size), becomes split by itself; not so a parameter, a model's "
    "buffer, and what shares its memory with an array, torch's graph or a second view (under torch.inference_mode with "
    "any view: use torch.no_grad). Fill a new one, use torch.where or torch.cat, or give parallelize or ff.Recipe "
    "unsupported='gather', which writes the gathered values."
)
_REFUSED: dict[str, str] = {
    "it works on whole matrices": """
        linalg.* cholesky cholesky_inverse cholesky_solve det logdet slogdet geqrf householder_product inverse
        lobpcg lu lu_solve lu_unpack orgqr ormqr svd_lowrank pca_lowrank
        istft nuclear_norm frobenius_norm norm_except_dim
        native_norm hspmm smm sspaddmm hash_tensor
    """,
    "it picks or orders elements by their positions in the whole tensor": """
        fill_diagonal_
        histogramdd combinations
        cartesian_prod meshgrid as_strided as_strided_ as_strided_copy as_strided_scatter
        slice_inverse affine_grid affine_grid_generator
        map_ map2_ apply_
    """,
    "it reads or writes at index tensors": """
        index embedding embedding_bag
    """,
    "the shape of its result depends on the values": """
        nonzero_static
    """,
    "it makes a Python value of the tensor": """
        item is_nonzero __bool__ __nonzero__ __int__ __long__ __float__ __complex__ __index__
        __repr__ __dlpack__ __dlpack_device__ sym_float sym_int
        _sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum __cuda_array_interface__
    """,
    "numpy would compute with it; write torch.as_tensor(array) for an array beside it": "__array_wrap__",
    "it reaches for the storage, which holds one part": """
        data_ptr const_data_ptr storage untyped_storage storage_offset storage_type set_ resize resize_ resize_as
        resize_as_ resize_as_sparse_ share_memory_ is_set_to is_shared module_load __setstate__ __reduce_ex__
        __deepcopy__ _nested_tensor_size _nested_tensor_storage_offsets _nested_tensor_strides
        _clear_non_serializable_cached_data from_file to_mkldnn qscheme
    """,
    "it differentiates forward; autograd.grad is exact": "_make_dual _unpack_dual",
    "it changes the shape in place": "squeeze_ unsqueeze_ transpose_ swapaxes_ swapdims_ t_ moveaxis_",
    "it is recurrent over a sequence": """
        miopen_rnn conv_tbc
    """,
    "it is for quantized, sparse, nested or vendor tensors": """
        q_* quantize* quantized_* fbgemm_* miopen_* int_repr dequantize choose_qparams_optimized
        ccol_indices* col_indices* crow_indices* row_indices* indices indices_copy
        values values_copy sparse_dim sparse_mask sparse_resize_ sparse_resize_and_clear_ to_dense to_sparse
        to_sparse_* coalesce is_coalesced _coalesced_ _dimI _dimV _indices _nnz _sparse_mask_projection _to_dense
        _values ipu xpu mtia hpu is_ipu is_maia is_mtia is_vulkan is_xla is_sparse_csr
    """,
    "it is an inner function of torch; the one in torch.nn.functional has a rule": """
        alpha_dropout batch_norm batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt
        batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats
        binary_cross_entropy_with_logits convolution feature_alpha_dropout group_norm instance_norm
        kl_div hinge_embedding_loss margin_ranking_loss cosine_embedding_loss triplet_margin_loss layer_norm
        native_batch_norm native_dropout native_group_norm native_layer_norm poisson_nll_loss
        rms_norm alias_copy narrow_copy
        unsafe_split_with_sizes autocast _autocast_to_full_precision _autocast_to_reduced_precision _backward_hooks
        _cdata _grad _grad_fn _post_accumulate_grad_hooks _version _is_view grad_dtype _has_grad_dtype_override name
        output_nr volatile is_distributed
    """,
    "it takes lists of tensors": "foreach.*",
    "it names dims": "_update_names align_as align_to has_names refine_names rename rename_",  # until torch 2.12
    "it compares or combines vectors in a way that is not split": """
        addr_ inner addmv_ addbmm_ addmm_
        baddbmm_ logcumsumexp_ repeat_interleave_
    """,
}
_BY_MEMORY = """
    as_strided as_strided_ as_strided_copy as_strided_scatter storage_offset set_ resize_ resize_as_
    squeeze_ unsqueeze_ transpose_ swapaxes_ swapdims_ t_ moveaxis_
"""


def _matching(pattern: str) -> list[Any]:
    """The functions a name stands for in torch, Tensor and torch.nn.functional; `*` ends a prefix."""
    module, _, rest = pattern.partition(".")
    if rest == "*":  # torch.foreach is there from torch 2.15 on
        space = getattr(torch, module, None)
        return [getattr(space, name) for name in dir(space) if not name.startswith("_")]
    found: list[Any] = []
    spaces: list[Any] = [torch, Tensor, F, torch.functional]
    for space in spaces:
        names = [n for n in dir(space) if n.startswith(pattern[:-1])] if pattern.endswith("*") else [pattern]
        for name in names:
            value = getattr(space, name, None)
            found += [value, getattr(value, "__get__", None)] if value is not None else []
    return found


def _reasons() -> dict[Any, str]:
    reasons: dict[Any, str] = {}
    for reason, names in _REFUSED.items():
        for pattern in names.split():
            for function in _matching(pattern):
                if callable(function):
                    reasons.setdefault(function, reason)
    return reasons


REASONS = _reasons()
BY_MEMORY = {found: REASONS[found] for name in _BY_MEMORY.split() for found in _matching(name) if found in REASONS}
BY_MEMORY[setters("data")[0]] = "it gives a view another memory than its base's"
"""Those that look at how a view lies in its base's memory, or change it: not so for a whole view of a split tensor."""
