"""Vision models of `transformers` from small configurations: few channels and blocks, every feature of the family.

Each function builds one model as a user would; its drop rates are zero, so that a step can be repeated exactly. The
models with position embeddings of a fixed size are built for images of `PATCHED`.
"""

from typing import Any

import transformers
from torch import nn

PATCHED = (96, 144)  # 6 x 9 patches of 16: an odd number of columns for two ranks
WINDOWED = (60, 92)  # in patches of 4: 15 x 23, in windows of 4 or 7 padded on both sides

WIDTHS = [8, 8, 16, 16]
ONE_EACH = [1, 1, 1, 1]
STAGES = ["stage1", "stage2", "stage3", "stage4"]
TRANSFORMER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
ENCODER = {**TRANSFORMER, "intermediate_size": 32}


def without_drops(config: Any) -> Any:
    """The configuration, and those inside it, with every rate that drops something at zero."""
    for key, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            without_drops(value)
        elif "drop" in key and isinstance(value, list):
            setattr(config, key, [0.0 for _ in value])
        elif "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def built(family: str, task: str = "ForImageClassification", **options: Any) -> nn.Module:
    """`transformers.<family><task>` from `<family>Config(**options)`."""
    config = without_drops(getattr(transformers, f"{family}Config")(**options))
    return getattr(transformers, f"{family}{task}")(config)


def resnet_config(**options: Any) -> Any:
    return transformers.ResNetConfig(embedding_size=8, hidden_sizes=WIDTHS, depths=ONE_EACH, **options)


def swin_config(**options: Any) -> Any:
    return transformers.SwinConfig(
        image_size=WINDOWED, embed_dim=8, depths=[2, 2, 1, 1], num_heads=[1, 2, 2, 4], window_size=4, **options
    )


# Convolutional backbones.


def bit() -> nn.Module:
    options = {"embedding_size": 8, "hidden_sizes": [16, 16, 32, 32], "depths": ONE_EACH, "num_groups": 4}
    return built("Bit", **options, embedding_dynamic_padding=True, num_labels=4)


def convnextv2() -> nn.Module:
    return built("ConvNextV2", hidden_sizes=WIDTHS, depths=[1, 1, 2, 1], num_labels=4)


def dinov3_convnext() -> nn.Module:
    return built("DINOv3ConvNext", "Model", hidden_sizes=WIDTHS, depths=ONE_EACH, layer_scale_init_value=0.5)


def mobilenet_v1() -> nn.Module:
    return built("MobileNetV1", depth_multiplier=0.25, num_labels=4)


def mobilenet_v2() -> nn.Module:
    return built("MobileNetV2", depth_multiplier=0.25, num_labels=4)


def efficientnet() -> nn.Module:
    return built("EfficientNet", width_coefficient=0.25, depth_coefficient=0.5, hidden_dim=320, num_labels=4)


def poolformer() -> nn.Module:
    return built("PoolFormer", hidden_sizes=WIDTHS, depths=ONE_EACH, layer_scale_init_value=0.5, num_labels=4)


def textnet() -> nn.Module:
    return built("TextNet", stem_out_channels=8, hidden_sizes=[8, 8, 8, 16, 16], num_labels=4)


def hgnet_v2() -> nn.Module:
    return built(
        "HGNetV2",
        stem_channels=[3, 8, 8],
        stage_in_channels=[8, 16, 16, 16],
        stage_mid_channels=[8, 8, 8, 8],
        stage_out_channels=[16, 16, 16, 16],
        stage_num_blocks=ONE_EACH,
        stage_numb_of_layers=[2, 2, 2, 2],
        hidden_sizes=[16, 16, 16, 16],
        use_learnable_affine_block=True,
        num_labels=4,
    )


def pp_lcnet() -> nn.Module:
    return built("PPLCNet", scale=0.25, class_expand=32, num_labels=4)


def superpoint() -> nn.Module:
    return built(
        "SuperPoint",
        "ForKeypointDetection",
        encoder_hidden_sizes=WIDTHS,
        decoder_hidden_size=16,
        descriptor_decoder_dim=16,
    ).encoder  # the interest point head turns scores into a list by a threshold: no gradient reaches it


# Convolutions and attention.


def segformer_classifier() -> nn.Module:
    return built("Segformer", hidden_sizes=WIDTHS, depths=ONE_EACH, num_attention_heads=[1, 2, 2, 4], num_labels=4)


def mobilevit(task: str = "ForImageClassification") -> nn.Module:
    return built(
        "MobileViT",
        task,
        hidden_sizes=[16, 16, 16],
        neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 32],
        num_attention_heads=2,
        aspp_out_channels=8,
        num_labels=4,
    )


def mobilevitv2(task: str = "ForImageClassification") -> nn.Module:
    return built(
        "MobileViTV2",
        task,
        width_multiplier=0.25,
        n_attn_blocks=[1, 1, 1],
        base_attn_unit_dims=[32, 32, 64],
        aspp_out_channels=8,
        num_labels=4,
    )


def focalnet() -> nn.Module:
    options = {"embed_dim": 8, "hidden_sizes": [8, 16, 32, 64], "depths": ONE_EACH, "use_layerscale": True}
    return built("FocalNet", **options, layerscale_value=0.5, use_conv_embed=True, num_labels=4)


def pvt() -> nn.Module:
    options = {"hidden_sizes": WIDTHS, "depths": ONE_EACH, "num_attention_heads": [1, 2, 2, 4]}
    return built("Pvt", **options, image_size=96, num_labels=4)


def pvt_v2(*, linear_attention: bool) -> nn.Module:
    options = {"hidden_sizes": WIDTHS, "depths": ONE_EACH, "num_attention_heads": [1, 2, 2, 4]}
    return built("PvtV2", **options, linear_attention=linear_attention, num_labels=4)


def cvt() -> nn.Module:
    return built("Cvt", embed_dim=[8, 16, 16], num_heads=[1, 2, 2], depth=[1, 2, 3], num_labels=4)


def levit() -> nn.Module:
    options = {"hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1]}
    down = [["Subsample", 8, 2, 2, 2, 2], ["Subsample", 8, 2, 2, 2, 2]]
    return built("Levit", **options, key_dim=[8, 8, 8], down_ops=down, image_size=PATCHED[0], num_labels=4)


def swiftformer() -> nn.Module:
    return built(
        "SwiftFormer", depths=[2, 2, 2, 2], embed_dims=[8, 16, 16, 24], layer_scale_init_value=0.5, num_labels=4
    )


# Windows.


def swin() -> nn.Module:
    options = {"embed_dim": 8, "depths": [2, 2, 1], "num_heads": [1, 2, 2], "window_size": 4}
    return built("Swin", **options, image_size=WINDOWED, num_labels=4)


def swinv2() -> nn.Module:
    options = {"embed_dim": 8, "depths": [2, 2, 1, 1], "num_heads": [1, 2, 2, 4], "window_size": 4}
    return built("Swinv2", **options, image_size=WINDOWED, num_labels=4)


def swin2sr() -> nn.Module:
    options = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "image_size": 28}
    return built("Swin2SR", "ForImageSuperResolution", **options)


def donut_swin() -> nn.Module:
    options = {"embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
    return built("DonutSwin", **options, image_size=WINDOWED, num_labels=4)


def hiera() -> nn.Module:
    options = {"embed_dim": 8, "depths": [1, 2, 2, 1], "num_heads": [1, 2, 2, 4], "masked_unit_size": [8, 8]}
    return built("Hiera", **options, image_size=[96, 160], query_stride=[2, 2], num_query_pool=2, num_labels=4)


def vitdet() -> nn.Module:
    return built(
        "VitDet",
        "Backbone",
        **TRANSFORMER,
        image_size=PATCHED,
        pretrain_image_size=64,
        window_block_indices=[0],
        residual_block_indices=[1],
        use_relative_position_embeddings=True,
        window_size=4,
    )


def sam_vision() -> nn.Module:
    return built(
        "SamVision",
        "Model",
        **TRANSFORMER,
        output_channels=8,
        image_size=96,
        window_size=4,
        global_attn_indexes=[1],
        mlp_dim=32,
    )


# Plain vision transformers.


def vit(family: str = "ViT", image_size: int | tuple[int, int] = PATCHED) -> nn.Module:
    return built(family, **ENCODER, image_size=image_size, num_labels=4)


def beit(task: str) -> nn.Module:
    return built(
        "Beit",
        task,
        **{**ENCODER, "num_hidden_layers": 4},
        image_size=96,
        use_relative_position_bias=True,
        out_indices=[1, 2, 3, 4],
        auxiliary_channels=8,
        num_labels=4,
    )


def dinov2(family: str = "Dinov2", **options: Any) -> nn.Module:
    return built(family, **TRANSFORMER, mlp_ratio=2, image_size=98, patch_size=14, num_labels=4, **options)


def dinov3_vit() -> nn.Module:
    return built("DINOv3ViT", "Model", **ENCODER, num_register_tokens=2, use_gated_mlp=True)


def yolos() -> nn.Module:
    return built("Yolos", "ForObjectDetection", **ENCODER, image_size=PATCHED, num_detection_tokens=5, num_labels=4)


# Dense heads.


def upernet_swin() -> nn.Module:
    backbone = swin_config(out_features=STAGES)
    options = {"hidden_size": 8, "auxiliary_in_channels": 32, "auxiliary_channels": 8, "num_labels": 5}
    return built("UperNet", "ForSemanticSegmentation", backbone_config=backbone, **options)


def dpt(task: str = "ForDepthEstimation") -> nn.Module:
    return built(
        "DPT",
        task,
        **{**ENCODER, "num_hidden_layers": 4},
        image_size=112,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=WIDTHS,
        fusion_hidden_size=8,
        use_batch_norm_in_fusion_residual=True,
        num_labels=5,
    )


def glpn() -> nn.Module:
    options = {"hidden_sizes": WIDTHS, "depths": ONE_EACH, "num_attention_heads": [1, 2, 2, 4]}
    return built("GLPN", "ForDepthEstimation", **options, decoder_hidden_size=8)


def depth_anything(family: str = "DepthAnything") -> nn.Module:
    backbone = transformers.Dinov2Config(
        **{**TRANSFORMER, "num_hidden_layers": 4},
        image_size=98,
        patch_size=14,
        out_indices=[1, 2, 3, 4],
        reshape_hidden_states=False,
    )
    options = {"neck_hidden_sizes": WIDTHS, "reassemble_hidden_size": 16, "fusion_hidden_size": 8}
    return built(family, "ForDepthEstimation", backbone_config=backbone, head_hidden_size=8, **options)


def zoedepth() -> nn.Module:
    backbone = transformers.BeitConfig(
        **{**ENCODER, "num_hidden_layers": 4},
        image_size=96,
        use_relative_position_bias=True,
        out_indices=[1, 2, 3, 4],
        reshape_hidden_states=False,
    )
    return built(
        "ZoeDepth",
        "ForDepthEstimation",
        backbone_config=backbone,
        neck_hidden_sizes=WIDTHS,
        fusion_hidden_size=8,
        bottleneck_features=8,
        num_relative_features=8,
        num_attractors=[4, 2, 2, 1],
        bin_embedding_dim=8,
        bin_configurations=[{"name": "all", "n_bins": 8, "min_depth": 0.001, "max_depth": 10.0}],
    )


def vitmatte() -> nn.Module:
    backbone = transformers.VitDetConfig(
        **TRANSFORMER, num_channels=4, image_size=96, pretrain_image_size=64, out_features=["stage2"]
    )
    options = {"hidden_size": 16, "convstream_hidden_sizes": [8, 8, 16], "fusion_hidden_sizes": [16, 16, 8, 8]}
    return built("VitMatte", "ForImageMatting", backbone_config=backbone, **options)


def vitpose() -> nn.Module:
    backbone = transformers.VitPoseBackboneConfig(**TRANSFORMER, image_size=list(PATCHED), out_features=["stage2"])
    return built("VitPose", "ForPoseEstimation", backbone_config=backbone, use_simple_decoder=False, num_labels=3)


# Videos, and image encoders of larger models.


def videomae() -> nn.Module:
    options = {"num_frames": 4, "tubelet_size": 2, "use_mean_pooling": True}
    return built("VideoMAE", "ForVideoClassification", **ENCODER, **options, image_size=96, num_labels=4)


def timesformer() -> nn.Module:
    return built("Timesformer", "ForVideoClassification", **ENCODER, num_frames=3, image_size=96, num_labels=4)


def vivit() -> nn.Module:
    return built("Vivit", "ForVideoClassification", **ENCODER, num_frames=4, image_size=96, num_labels=4)


def clip_vision(family: str = "CLIPVision") -> nn.Module:
    return built(family, "Model", **ENCODER, image_size=96, patch_size=16)


def sam2_hiera() -> nn.Module:
    return built(
        "Sam2HieraDet",
        "Model",
        hidden_size=8,
        num_attention_heads=1,
        image_size=[96, 160],
        blocks_per_stage=[1, 1, 2, 1],
        embed_dim_per_stage=[8, 16, 32, 64],
        num_attention_heads_per_stage=[1, 2, 4, 8],
        window_size_per_stage=[4, 4, 6, 3],
        global_attention_blocks=[3],
        window_positional_embedding_background_size=[3, 3],
    )


def pixio() -> nn.Module:
    return built("Pixio", "Backbone", **TRANSFORMER, image_size=96, n_cls_tokens=2, out_features=["stage1", "stage2"])


def data2vec() -> nn.Module:
    return built("Data2VecVision", **ENCODER, image_size=96, use_relative_position_bias=True, num_labels=4)
