"""The training step: its options, the update, rounds of local steps, its state.

A gradient in `make_train_step(loss, adam(1e-3), mesh=data_mesh(), shard="params")`, where the data
axis is a shard axis, and there are no worker axes:

1. `loss/objective.shard_objective` runs `differentiate` on each device, on its shards and examples.
2. `Gather.wrap` of loss/objective.py puts a `ShardedParam` in place of each divided leaf, and
   `loss/loss_program.py` gathers it: for the whole loss, or a layer at a time in a scan.
3. The backward pass of `gather_shard` (`mesh/layout/shards.py`) reduce-scatters each gradient: the
   mean over the devices, as a shard; with worker axes it averages the shard over them too.
   `scatter_gradients` all-reduces the gradients of whole leaves.
4. `worker_step`, outside of the `shard_map`, sees whole arrays, which the compiler divides: the
   norm of a clip is the norm over all shards. Without worker axes `reduce_gradients` changes
   nothing.
5. `tx.update` is as in `optfn.core`. `gather_new_params` gathers nothing here; with "state", all.
6. `composition._place_state` pads the new state, and constrains it to the specs of the layout.
"""
