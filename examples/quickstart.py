"""Three prompts that share a prefix, on a toy model whose state is the sum of its tokens."""

import asyncio

from phloem import CacheConfig, CacheRuntime, ModelLayout, StateSpec

total = StateSpec("sum", (1,), "float32", layers=1)
layout = ModelLayout.hybrid(kv_layers=1, kv_heads=1, head_dim=2, states=[total])
config = CacheConfig(layout=layout, page_size=4, state_chunk=4, device_pages=64, device_states=8)


async def main() -> None:
    async with CacheRuntime(config) as cache:
        sums = cache.pools.states[0]["sum"]
        for prompt in ([*range(18), *tail] for tail in ([50] * 4, [60] * 4, [70] * 4)):
            async with cache.request(prompt) as request:
                await request.allocate(len(prompt) - request.computed)  # pages and a state slot
                await request.ready()  # the slot has a private copy of the state that is reused
                while request.computed < len(prompt):
                    start, end = request.next_stop(limit=8)
                    with cache.step([request]) as step:  # a forward pass
                        sums[request.state_slot] += sum(prompt[start:end])
                        step.launched({request: end})
                    await request.checkpoint()  # publishes pages and, where it is worth it, a state
                assert sums[request.state_slot] == sum(prompt)
                print(request.usable, "of", len(prompt), "reused; not reused:", request.match.lost)
                await request.finish()


asyncio.run(main())
