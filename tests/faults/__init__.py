"""What happens to a run that something goes wrong with: a table of faults, tried on real processes.

    make faults            or            PYTHONPATH=tests python -m faults [--quick] [--only NAME …]

Each fault is a function: it does the damage, and returns what was seen if that is what is promised.
A run that has not ended in time is a hang, and fails; so do workers that end with different params.
Faults of links and disks need root, and Linux's ip, tc, unshare and mount; elsewhere they are left
out with the reason. The exit status is 1 if a fault fails.
"""

# In this order they stand in the table.
from faults import deaths, elastic, unlike, two_levels, links, disks, files  # noqa: F401, I001
from faults.table import FAULTS as FAULTS
from faults.table import tried as tried
