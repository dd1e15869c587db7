"""An agent of sbx, which calls `optimizer_class` with its learning rate."""

from clients import assert_same_run, with_rules
from sbx import DQN


@with_rules()
def test_the_network_of_an_agent(rule):
    def run(tx):
        policy = {"net_arch": [16], "optimizer_class": lambda learning_rate: tx}
        agent = DQN(
            "MlpPolicy", "CartPole-v1", seed=0, policy_kwargs=policy,
            learning_starts=20, buffer_size=100, batch_size=8,
        )  # fmt: skip
        return agent.learn(80).policy.qf_state.params

    assert_same_run(run, rule, 0.001)
