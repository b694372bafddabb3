"""Generate, GenerateStream: many requests at once on one event loop."""

import asyncio
import os

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")


async def main() -> None:
    async with decant.AsyncClient(ADDRESS) as client:
        prompts = ["import ", "def main():\n", "for key, value in "]
        answers = await asyncio.gather(*(client.generate(prompt, max_tokens=10, timeout=60) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            print(repr(prompt + answer.text))


asyncio.run(main())
