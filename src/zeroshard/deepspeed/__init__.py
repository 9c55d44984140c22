"""DeepSpeed's interface over zeroshard: `import zeroshard.deepspeed as deepspeed`, or `zeroshard.deepspeed.install()` before anything else.

    python -m zeroshard.deepspeed script.py ...        for a script that says `import deepspeed`, unchanged

What is here, and where it comes from, is the table in zeroshard/integrations/deepspeed/surface.py.
"""

import sys

from ..integrations.deepspeed.door import open_door

open_door(sys.modules[__name__])
