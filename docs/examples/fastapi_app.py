"""An engine inside a FastAPI application: ``fastapi run fastapi_app.py`` serves the demo."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from corun import AsyncEngine, CorunError, SamplingParams
from corun.runtime.demo import chat_prompt
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, StreamingResponse

engine = AsyncEngine()  # without a model: the demo and its adapters


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start the engine with the application, and shut it down with it."""
    async with engine:
        yield


app = FastAPI(lifespan=lifespan)


@app.exception_handler(CorunError)
async def refuse(request: Request, error: CorunError) -> PlainTextResponse:
    """Answer with the message and the status of corun's error."""
    return PlainTextResponse(str(error), error.status)


@app.get("/{adapter}")
async def answer(adapter: str, text: str) -> StreamingResponse:
    """Stream the adapter's answer."""
    params = SamplingParams(temperature=0, max_tokens=64)
    outputs = engine.generate(chat_prompt(text), params, lora_request=adapter)
    first = await anext(outputs)  # errors are raised here, before the response has a status

    async def stream() -> AsyncIterator[str]:
        async with aclosing(outputs):
            yield first.outputs[0].new_text
            async for output in outputs:
                yield output.outputs[0].new_text

    return StreamingResponse(stream(), media_type="text/plain")
