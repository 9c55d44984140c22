"""DeepSpeed's interface over zeroshard: `import zeroshard.deepspeed as deepspeed`, or `zeroshard.deepspeed.install()` before anything else.

    python -m zeroshard.deepspeed script.py ...        for a script that says `import deepspeed`, unchanged

What is here, and where it comes from, is the table in zeroshard/integrations/deepspeed/surface.py; the imports below are
those of the package itself, for editors and type checkers.
"""

import sys
from typing import TYPE_CHECKING

from ..integrations.deepspeed.door import open_door

if TYPE_CHECKING:
    from ..integrations.deepspeed import activation, communication, partition
    from ..integrations.deepspeed.accelerator import get_accelerator as get_accelerator
    from ..integrations.deepspeed.communication import TORCH_DISTRIBUTED_DEFAULT_PORT as TORCH_DISTRIBUTED_DEFAULT_PORT
    from ..integrations.deepspeed.communication import init_distributed as init_distributed
    from ..integrations.deepspeed.door import install as install
    from ..integrations.deepspeed.ds_config import DeepSpeedConfig as DeepSpeedConfig
    from ..integrations.deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine
    from ..integrations.deepspeed.logs import log_dist as log_dist
    from ..integrations.deepspeed.logs import logger as logger
    from ..integrations.deepspeed.pipe import PipelineModule as PipelineModule
    from ..integrations.deepspeed.pipe_engine import PipelineEngine as PipelineEngine
    from ..integrations.deepspeed.sections import DeepSpeedConfigError as DeepSpeedConfigError
    from ..integrations.deepspeed.setup import add_config_arguments as add_config_arguments
    from ..integrations.deepspeed.setup import initialize as initialize
    from ..integrations.deepspeed.stand_ins import DeepSpeedHybridEngine as DeepSpeedHybridEngine
    from ..integrations.deepspeed.stand_ins import DeepSpeedInferenceConfig as DeepSpeedInferenceConfig
    from ..integrations.deepspeed.stand_ins import DeepSpeedOptimizer as DeepSpeedOptimizer
    from ..integrations.deepspeed.stand_ins import DeepSpeedTransformerConfig as DeepSpeedTransformerConfig
    from ..integrations.deepspeed.stand_ins import DeepSpeedTransformerLayer as DeepSpeedTransformerLayer
    from ..integrations.deepspeed.stand_ins import InferenceEngine as InferenceEngine
    from ..integrations.deepspeed.stand_ins import init_inference as init_inference
    from ..integrations.deepspeed.stand_ins import replace_transformer_layer as replace_transformer_layer
    from ..integrations.deepspeed.stand_ins import set_autotp_mode as set_autotp_mode
    from ..integrations.deepspeed.tensor_parallel import tp_model_init as tp_model_init
    from ..integrations.deepspeed.utilities import OnDevice as OnDevice

    checkpointing, comm, zero = activation, communication, partition
    __version__ = version = __git_hash__ = __git_branch__ = ""
    __version_major__ = __version_minor__ = __version_patch__ = 0

open_door(sys.modules[__name__])
del TYPE_CHECKING, open_door, sys  # `dir` shows the interface
