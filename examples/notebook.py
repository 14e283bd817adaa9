"""The propagator without `async`: for scripts and notebooks.

python examples/notebook.py
"""

from __future__ import annotations

import numpy as np

from delta_prop import Delta, Refused, SyncPropagator, create, offset, transform
from delta_prop.sinks import CacheSink, IndexSink


def unit(vector):
    """Scale a vector to length 1. The service replaces the vector by the result of its transform."""
    return vector / np.linalg.norm(vector)


def main() -> None:
    with SyncPropagator() as p:
        index, cache = p.attach(IndexSink()), p.attach(CacheSink())

        ids = [f"point-{n}" for n in range(1000)]
        points = np.random.default_rng(0).standard_normal((1000, 8))
        ack = p.publish_many(ids, points)  # one call with whole columns, without an object per row
        p.wait_visible(ack)
        print("nearest:", p.call(lambda: index.search(points[7], k=1))[0].vector_id)

        p.register_transform("unit", unit, reads="cache")
        p.wait_visible(p.publish(Delta("point-7", transform("unit"))))
        state = p.call(lambda: cache.get("default", "point-7"))
        print("length:", np.linalg.norm(state.vector).round(6))

        try:  # two writers expect the same last delta of a vector: the second writer is refused
            head = p.head("point-7")
            p.publish(Delta("point-7", offset(1.0), expect=head))
            p.publish(Delta("point-7", create(points[0]), expect=head))
        except Refused as refusal:
            print("refused:", refusal.code.name)
        print("accepted:", p.statistics().accepted)


if __name__ == "__main__":
    main()
