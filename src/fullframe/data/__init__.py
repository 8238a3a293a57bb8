"""Data sets in known formats, and what a data set offers so that each rank reads its part only.

Tried on small files made in these formats, not on the real data sets.
"""

from fullframe.data.kitti import KittiStereo
from fullframe.data.nuscenes import CAMERAS, DETECTION_CLASSES, NuScenes
from fullframe.data.padding import Padded
from fullframe.data.segmentation import IGNORED, SegmentationFolder
from fullframe.data.slices import SliceReader

__all__ = [
    "CAMERAS",
    "DETECTION_CLASSES",
    "IGNORED",
    "KittiStereo",
    "NuScenes",
    "Padded",
    "SegmentationFolder",
    "SliceReader",
]
