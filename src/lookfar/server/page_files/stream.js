// Requests to the server: JSON, and chunks of a streamed answer.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function failure(response) {
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch { /* not in the usual form */ }
  return new ApiError(response.status, message);
}

export async function getJson(path, key) {
  const response = await fetch(path, { headers: headers(key) });
  if (!response.ok) throw await failure(response);
  return response.json();
}

// Yields the chunks of a streamed completion; throws an ApiError for an error in front of or inside the stream.
export async function* chunks(path, body, key, signal) {
  const response = await fetch(path, { method: "POST", headers: headers(key), body: JSON.stringify(body), signal });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const events = buffer.split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (!data || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(500, chunk.error.message);
      yield chunk;
    }
  }
}
