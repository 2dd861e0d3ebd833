"""The engine's process over the successor model without a device, with faults on request.

`hf_overrides` of the configuration holds {"fault": name, "step": number, "step_s": seconds}: from
that step on it raises, hangs or exits; `step_s` is how long every step takes. With the fault
"submit" every request meets an error that nobody foresaw.
"""

import os
import sys
import time
from pathlib import Path

from jaxpaged.engine.async_engine import AsyncLLM
from jaxpaged.engine.wire import Start
from jaxpaged.engine.worker import main
from tests.support.fake_engine import fake_llm

EXIT_CODE = 3


def make(start: Start) -> AsyncLLM:
    model = start.config.model
    wanted = dict(model.hf_overrides)
    llm, engine = fake_llm(Path(model.model) / "fake", names=model.served_model_name)

    def before_step(step: int) -> None:
        time.sleep(wanted.get("step_s", 0.0))
        if step < wanted.get("step", 0):
            return
        match wanted.get("fault"):
            case "raise":
                raise RuntimeError("broken on purpose")
            case "hang":
                time.sleep(600)
            case "exit":
                os._exit(EXIT_CODE)

    async def broken(*_args, **_keywords):
        raise TypeError("broken on purpose")

    engine.before_step = before_step
    if wanted.get("fault") == "submit":
        llm.submit = broken
    return llm


if __name__ == "__main__":
    sys.exit(main(make))
