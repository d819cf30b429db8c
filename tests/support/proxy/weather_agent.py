"""Runs agents of Pydantic AI, as in its documentation: `python -m tests.support.proxy.weather_agent MODEL...`.

Where the models are, and the keys, stand in the environment. Each is asked a question twice, the second time with
streams; what is heard is written as a line of JSON each time.
"""

import asyncio
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.usage import RunUsage

__all__ = ["main"]


async def main(model: str) -> None:
    """Runs an agent with a model such as `anthropic:NAME`."""
    asked: list[str] = []
    agent = Agent(model, instructions="Be brief.")

    @agent.tool_plain
    def weather(city: str) -> str:  # pyright: ignore[reportUnusedFunction] - the agent has it
        """Tells the weather of a city."""
        asked.append(city)
        return "heavy rain"

    finished = await agent.run("What will the weather be?")
    _write(finished.output, finished.usage, asked)
    async with agent.run_stream("And now?") as streamed:
        output = await streamed.get_output()
        _write(output, streamed.usage, asked)


def _write(output: str, usage: RunUsage, asked: list[str]) -> None:
    counts = {"requests": usage.requests, "input": usage.input_tokens, "cached": usage.cache_read_tokens}
    print(json.dumps({"output": output, "asked": asked, **counts}), flush=True)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        asyncio.run(main(each))
