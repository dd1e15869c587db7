"""The core: rules, the boundary around them, and the walk over leaves. It imports itself alone.

Read `optfn.core.protocol` first, whose names are those of this module too. The other files:
`boundary` (gradients and params enter a rule, updates leave it), `leafwise` (a rule on arrays,
applied to each leaf), `tree` (leaves and their paths), `numerics` (arithmetic of rules), `traits`
(declarations of a type of state), `checks` (of arguments), `types` and `printing`.

A gradient on its way through `adam(1e-3, grad_clip=clip_by_global_norm(1.0)).update`:

1. `protocol.with_boundary` gets it, calls `boundary.enter`: checked, float32, masked where frozen.
2. `protocol.chained` passes it to the rules of the optimizer, one after the other.
3. `transforms/clipping.py`: its norm with all others, and one factor for all (`leafwise.scale`).
4. `transforms/adam.py`: `leafwise.apply` runs `adam_rule` on each leaf with its two moments.
5. `transforms/learning_rate.py`: the direction becomes a step, −lr·u.
6. `boundary.enter` has returned `leave`, which gives the update the dtype of the parameter.
"""

from optfn.core.protocol import Call as Call
from optfn.core.protocol import Factory as Factory
from optfn.core.protocol import Rule as Rule
from optfn.core.protocol import Transform as Transform
from optfn.core.protocol import accumulating as accumulating
from optfn.core.protocol import called as called
from optfn.core.protocol import chain as chain
from optfn.core.protocol import chained as chained
from optfn.core.protocol import check_params_given as check_params_given
from optfn.core.protocol import check_transform as check_transform
from optfn.core.protocol import described as described
from optfn.core.protocol import first_step as first_step
from optfn.core.protocol import links_of as links_of
from optfn.core.protocol import named as named
from optfn.core.protocol import next_step as next_step
from optfn.core.protocol import rule as rule
from optfn.core.protocol import rule_of as rule_of
from optfn.core.protocol import stateless as stateless
from optfn.core.protocol import transform as transform
from optfn.core.protocol import with_boundary as with_boundary
from optfn.core.types import OptState as OptState
from optfn.core.types import Params as Params
from optfn.core.types import Updates as Updates
