"""The core: transformations, the boundary around them, and the walk over leaves.

It imports itself alone. Read `optfn.core.protocol` first; its functions are here too.

The files: `boundary` (gradients and params enter, updates leave), `leafwise` (a rule on arrays,
applied to each leaf), `tree` (leaves and their paths), `numerics` (arithmetic of rules), `traits`
(declarations of a type of state), `checks` (of arguments), `errors` (about leaves and states),
`third_party` (transformations of optax and of users), `updates` (params + updates), `types` and
`printing`.

A gradient on its way through `adam(1e-3, grad_clip=clip_by_global_norm(1.0)).update`:

1. `protocol.with_boundary` calls `boundary.enter`, which checks gradients and params, casts them
   to float32 and masks frozen leaves.
2. `protocol.chain_unchecked` passes the gradients to the links of the optimizer, in order.
3. `transforms/clipping.py` computes one norm over all leaves and scales every leaf by the same
   factor (`leafwise.scale`).
4. `transforms/adam.py`: `leafwise.apply` runs `adam_rule` on each leaf with its two moments.
5. `transforms/learning_rate.py` turns the direction u into a step, −lr·u.
6. `leave`, a function that `boundary.enter` returned in step 1, casts each update to the dtype of
   its parameter.
"""

from optfn.core.protocol import Transform as Transform
from optfn.core.protocol import Unchecked as Unchecked
from optfn.core.protocol import accumulating as accumulating
from optfn.core.protocol import call_factory as call_factory
from optfn.core.protocol import chain as chain
from optfn.core.protocol import chain_unchecked as chain_unchecked
from optfn.core.protocol import check_params_given as check_params_given
from optfn.core.protocol import check_transform as check_transform
from optfn.core.protocol import describe as describe
from optfn.core.protocol import first_step as first_step
from optfn.core.protocol import links_of as links_of
from optfn.core.protocol import next_step as next_step
from optfn.core.protocol import record_call as record_call
from optfn.core.protocol import returns_transformation as returns_transformation
from optfn.core.protocol import rule as rule
from optfn.core.protocol import stateless as stateless
from optfn.core.protocol import strip_boundary as strip_boundary
from optfn.core.protocol import transform as transform
from optfn.core.protocol import with_boundary as with_boundary
from optfn.core.types import Params as Params
