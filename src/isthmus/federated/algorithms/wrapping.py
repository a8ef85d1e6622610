"""An algorithm around another one: the same clients, but what is made of their values is changed on the way."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from isthmus.federated.algorithms.algorithm import Algorithm, Cohort, Combine, Pass, Values


class Wrapping(Algorithm, frozen=True):
    """Subclass, and define `operations` and `changed`. What passes are asked for is the inner algorithm's."""

    inner: Algorithm

    def operations(self, returns: Mapping[str, Combine]) -> Mapping[str, Combine]:
        """How the values of a pass are combined, in place of what the inner algorithm declares."""
        raise NotImplementedError

    def changed(self, returns: Mapping[str, Combine], combined: Values, cohort: Cohort) -> Values:
        """What the inner algorithm's server is given, for what `operations` gave."""
        raise NotImplementedError

    def init_server(self, model: Tensor) -> Values:
        return self.inner.init_server(model)

    def init_client(self, model: Tensor) -> Values | None:
        return self.inner.init_client(model)

    @property
    def state_can_be_lost(self) -> bool:
        return self.inner.state_can_be_lost

    def own_model(self, model: Tensor, state: Values) -> Tensor | None:
        return self.inner.own_model(model, state)

    def broadcast(self, server: Values) -> Values:
        return self.inner.broadcast(server)

    @property
    def passes(self) -> tuple[Pass, ...]:
        return tuple(self._around(one) for one in self.inner.passes)

    def _around(self, one: Pass) -> Pass:
        def server(values: Values, combined: Values, cohort: Cohort) -> Values:
            return one.server(values, self.changed(one.returns, combined, cohort), cohort)

        return Pass(returns=self.operations(one.returns), client=one.client, server=server)
