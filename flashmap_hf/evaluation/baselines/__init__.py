"""What FlashMap is compared with: a factorised block, features one after the other, and independent heads.

`load(folder, target)` gives a `Baseline`; `flashmap baselines` trains them.
"""

from flashmap_hf.evaluation.baselines.baseline import Baseline, load
from flashmap_hf.evaluation.baselines.configuration import KINDS, BaselineConfig
from flashmap_hf.evaluation.baselines.modeling import BaselineDrafter
from flashmap_hf.evaluation.baselines.sizing import CLASSES, sized_like

__all__ = ["CLASSES", "KINDS", "Baseline", "BaselineConfig", "BaselineDrafter", "load", "sized_like"]
