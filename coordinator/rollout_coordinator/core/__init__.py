"""The pure core: `handle(event, now) -> Step(writes, sends, loads, wake_at)`. No asyncio, clock, randomness or I/O."""
