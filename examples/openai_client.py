"""The `openai` package with a lookfar server: an answer, and a stream.

pip install 'lookfar[demo,serve]' openai
lookfar serve                                    # in another terminal
python examples/openai_client.py [URL]
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Name three colours."}]

    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=32)
    print(answer.choices[0].message.content)
    print("counts:", answer.usage.model_extra["lookfar"])  # steps, tokens per step, draft tokens of each source

    stream = client.chat.completions.create(model=model, messages=messages, max_tokens=32, stream=True)
    for part in stream:
        if part.choices:
            print(part.choices[0].delta.content or "", end="", flush=True)
    print()
