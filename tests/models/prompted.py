"""Models of `transformers` that are given more than an image: points, texts, an example, a coarse depth."""

import torch
import transformers
from torch import nn

from tests.models.from_transformers import ENCODER, TRANSFORMER, built
from tests.models.zoo import Inputs, images

WITH_EXAMPLE = ("pixel_values", "prompt_pixel_values", "prompt_masks", "labels")
WITH_DEPTH = ("pixel_values", "prompt_depth")


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(17)


def with_points(height: int, width: int) -> Inputs:
    """Two points on an object in each of two images, (batch, object, point, xy)."""
    places = torch.rand(2, 1, 2, 2, generator=_generator(), dtype=torch.float64) * min(height, width)
    labels = torch.ones(2, 1, 2, dtype=torch.int64)
    return {"pixel_values": images(2, height, width), "input_points": places, "input_labels": labels}


def sam() -> nn.Module:
    vision = {"output_channels": 16, "window_size": 4, "global_attn_indexes": [1], "mlp_dim": 32, "num_pos_feats": 8}
    return built(
        "Sam",
        "Model",
        vision_config={**TRANSFORMER, **vision, "image_size": 96},
        prompt_encoder_config={"hidden_size": 16, "image_size": 96, "mask_input_channels": 4},
        mask_decoder_config=_MASK_DECODER,
    )


_MASK_DECODER = {"hidden_size": 16, "mlp_dim": 16, "num_attention_heads": 2, "iou_head_hidden_dim": 16}


def sam2() -> nn.Module:
    hiera = transformers.Sam2HieraDetConfig(
        hidden_size=8,
        image_size=[128, 128],
        blocks_per_stage=[1, 1, 2, 1],
        embed_dim_per_stage=[8, 16, 32, 64],
        num_attention_heads_per_stage=[1, 2, 2, 4],
        window_size_per_stage=[4, 2, 4, 2],
        global_attention_blocks=[3],
    )
    vision = transformers.Sam2VisionConfig(
        backbone_config=hiera,
        backbone_channel_list=[64, 32, 16, 8],
        backbone_feature_sizes=[[32, 32], [16, 16], [8, 8]],
        fpn_hidden_size=16,
    )
    return built(
        "Sam2",
        "Model",
        vision_config=vision,
        prompt_encoder_config={"hidden_size": 16, "image_size": 128, "mask_input_channels": 4},
        mask_decoder_config=_MASK_DECODER,
    )


def with_text(height: int, width: int) -> Inputs:
    """Two images, a sentence for each, and the pixels it speaks of."""
    words = torch.randint(3, 90, (2, 7), generator=_generator())
    pixels = (images(2, height, width)[:, 0] > 0).double()
    return {"pixel_values": images(2, height, width), "input_ids": words, "labels": pixels}


def clipseg() -> nn.Module:
    return built(
        "CLIPSeg",
        "ForImageSegmentation",
        vision_config={**ENCODER, "num_hidden_layers": 4, "image_size": 96, "patch_size": 16},
        text_config={**ENCODER, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 99},
        projection_dim=16,
        extract_layers=[1, 2, 3],
        reduce_dim=8,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=16,
    )


def with_example(height: int, width: int) -> Inputs:
    """Images, and examples with their painted masks; the lower half of the tokens is to be painted."""
    four = images(8, height, width).chunk(4)
    tokens = height // 16 * (width // 16) * 2
    return {**dict(zip(WITH_EXAMPLE, four, strict=True)), "bool_masked_pos": (torch.arange(tokens) * 2 >= tokens)[None]}


def seggpt() -> nn.Module:
    return built(
        "SegGpt",
        "ForImageSegmentation",
        **{**TRANSFORMER, "num_hidden_layers": 5},
        mlp_dim=32,
        image_size=[128, 64],
        pretrain_image_size=64,
        decoder_hidden_size=8,
        merge_index=0,
        intermediate_hidden_state_indices=[1, 2, 3, 4],
    )


def with_coarse_depth(height: int, width: int) -> Inputs:
    return dict(
        zip(WITH_DEPTH, (images(2, height, width), images(2, height // 4, width // 4)[:, :1].abs()), strict=True)
    )
