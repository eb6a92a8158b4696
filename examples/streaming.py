"""Print an answer as it comes. Each chunk is the text of one step. The stream is closed after three sentences.

python examples/streaming.py
"""

import lookfar

lm = lookfar.load("demo")
prompt = lm.chat_prompt([{"role": "user", "content": "Explain in short sentences why leaves turn red in autumn."}])

text = ""
with lm.stream(prompt, max_new_tokens=96) as stream:
    for chunk in stream:
        print(chunk.text, end="|", flush=True)  # a bar after each step
        text += chunk.text
        if text.count(".") >= 3:
            break  # the end of the block cancels the request

print(f"\n{chunk.stats.tokens} tokens in {chunk.stats.steps} steps")
