"""Detection and mask models of `transformers` from small configurations, every feature of the family."""

from typing import Any

import transformers
from torch import nn

from tests.models.from_transformers import (
    ONE_EACH,
    STAGES,
    TRANSFORMER,
    WIDTHS,
    built,
    resnet_config,
    swin_config,
    without_drops,
)


def detr(family: str = "Detr", task: str = "ForObjectDetection", **options: Any) -> nn.Module:
    layers = {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8, "num_queries": 6, "num_labels": 3}
    outputs = {"out_features": STAGES} if family == "DeformableDetr" or task == "ForSegmentation" else {}
    backbone = resnet_config(**outputs)
    return built(family, task, **layers, **heads, d_model=32, backbone_config=backbone, **options)


def deformable_detr(*, two_stage: bool = True) -> nn.Module:
    """Proposals of the encoder are chosen by `topk` and refined by each decoder layer."""
    return detr("DeformableDetr", num_feature_levels=4, two_stage=two_stage, with_box_refine=two_stage)


def dab_detr() -> nn.Module:
    layers = {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8, "num_queries": 6, "num_labels": 3}
    return built("DabDetr", "ForObjectDetection", **layers, **heads, hidden_size=32, backbone_config=resnet_config())


def rt_detr(family: str = "RTDetr") -> nn.Module:
    stages = {"embedding_size": 8, "hidden_sizes": WIDTHS, "depths": ONE_EACH, "out_features": STAGES[1:]}
    if family == "DFine":
        backbone = transformers.HGNetV2Config(
            stem_channels=[3, 8, 8],
            stage_in_channels=[8, 16, 16, 16],
            stage_mid_channels=[8, 8, 8, 8],
            stage_out_channels=[16, 16, 16, 16],
            stage_num_blocks=ONE_EACH,
            stage_numb_of_layers=[2, 2, 2, 2],
            hidden_sizes=[16, 16, 16, 16],
            out_features=STAGES[1:],
        )
    else:
        backbone = transformers.RTDetrResNetConfig(**stages, layer_type="basic")
    own = {"max_num_bins": 8, "lqe_hidden_dim": 8} if family == "DFine" else {}
    return built(
        family,
        "ForObjectDetection",
        backbone_config=backbone,
        encoder_hidden_dim=16,
        encoder_in_channels=[16, 16, 16] if family == "DFine" else WIDTHS[1:],
        encoder_ffn_dim=32,
        encoder_attention_heads=2,
        d_model=16,
        num_queries=6,
        decoder_in_channels=[16, 16, 16],
        decoder_ffn_dim=32,
        decoder_layers=2,
        decoder_attention_heads=2,
        hidden_expansion=0.5,
        num_denoising=0,
        num_labels=3,
        **own,
    )


def maskformer() -> nn.Module:
    decoder = transformers.DetrConfig(
        d_model=32, decoder_layers=2, decoder_ffn_dim=32, decoder_attention_heads=4, num_queries=5, encoder_layers=1
    )
    config = transformers.MaskFormerConfig(
        backbone_config=swin_config(out_features=STAGES),
        decoder_config=decoder,
        fpn_feature_size=32,
        mask_feature_size=32,
        num_labels=3,
    )
    return transformers.MaskFormerForInstanceSegmentation(without_drops(config))


def mask2former() -> nn.Module:
    config = transformers.Mask2FormerConfig(
        backbone_config=swin_config(out_features=STAGES),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=4,
        dim_feedforward=32,
        num_queries=5,
        num_labels=3,
    )
    return transformers.Mask2FormerForUniversalSegmentation(without_drops(config))


def oneformer() -> nn.Module:
    config = transformers.OneFormerConfig(
        backbone_config=swin_config(out_features=STAGES),
        conv_dim=32,
        mask_dim=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        encoder_layers=1,
        decoder_layers=3,
        query_dec_layers=1,
        num_attention_heads=4,
        dim_feedforward=32,
        num_queries=5,
        task_seq_len=7,
        num_labels=3,
    )
    return transformers.OneFormerForUniversalSegmentation(without_drops(config))


def eomt() -> nn.Module:
    options = {"num_blocks": 1, "num_queries": 5, "num_upscale_blocks": 1, "num_register_tokens": 2, "mlp_ratio": 2}
    return built("Eomt", "ForUniversalSegmentation", **TRANSFORMER, **options, image_size=96, num_labels=3)


def lw_detr(family: str = "LwDetr") -> nn.Module:
    """Windowed blocks of a plain vision transformer, and a decoder that is trained in groups of queries."""
    vit = {**TRANSFORMER, "num_hidden_layers": 4, "mlp_ratio": 2, "num_windows": 4, "out_indices": [2, 4]}
    heads = {"decoder_self_attention_heads": 2, "decoder_cross_attention_heads": 2, "group_detr": 2}
    if family == "LwDetr":
        more = {"image_size": 128, "pretrain_image_size": 64, "window_block_indices": [0, 2]}
        backbone, own = transformers.LwDetrViTConfig(**vit, **more), {"projector_scale_factors": [2.0, 0.5]}
    else:
        backbone = transformers.RfDetrDinov2Config(**{**vit, "num_windows": 2}, image_size=112, patch_size=14)
        own = {"intermediate_size": 32}
    return built(
        family,
        "ForObjectDetection",
        backbone_config=backbone,
        d_model=32,
        decoder_ffn_dim=32,
        decoder_layers=2,
        num_queries=6,
        c2f_num_blocks=1,
        num_labels=3,
        **heads,
        **own,
    )
