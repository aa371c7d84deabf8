// A client of the HTTP API. Paths are relative, so that a proxy may put the server below a folder.

export class ApiError extends Error {
  /** status: of HTTP; 0 if the server could not be reached or the connection was lost. */
  constructor(message, status = 0, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const LOST = "The connection to the server was lost before the answer was complete.";

export function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export async function send(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const error = body.error ?? {};
  throw new ApiError(error.message ?? `The server answered ${response.status}.`, response.status, error.code);
}

/** Return the served model: its id, and what it can do. A field that another server leaves out is undefined. */
export async function servedModel(key) {
  const response = await send("v1/models", { headers: headers(key) });
  return (await response.json()).data[0];
}

/** Return whether the server's processes are alive. */
export async function isAlive() {
  try {
    return (await fetch("health", { cache: "no-store", signal: AbortSignal.timeout(2000) })).ok;
  } catch {
    return false;
  }
}

/** Yield the chunks of a streamed completion in the form of a chat's. */
export async function* streamText(request, options) {
  for await (const chunk of stream("v1/completions", request, options)) {
    const choices = chunk.choices.map(({ text, logprobs, ...choice }) => ({
      ...choice,
      delta: { content: text },
      logprobs: logprobs && { content: entriesOf(logprobs) },
    }));
    yield { ...chunk, choices };
  }
}

function entriesOf({ tokens, token_logprobs: logprobs, top_logprobs: tops }) {
  return tokens.map((token, index) => ({
    token,
    logprob: logprobs[index],
    top_logprobs: Object.entries(tops?.[index] ?? {}).map(([other, logprob]) => ({ token: other, logprob })),
  }));
}

/** Yield the chunks of a streamed chat completion. */
export function streamChat(request, options) {
  return stream("v1/chat/completions", request, options);
}

/** Yield the chunks of a stream. Throws ApiError, or AbortError after a stop. */
async function* stream(path, request, { key, signal }) {
  const response = await send(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError(LOST);
      const events = (text + value).split("\n\n");
      text = events.pop();
      for (const event of events) {
        if (event.startsWith(":")) continue; // a comment
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error.message, 0, chunk.error.code);
        yield chunk;
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError(LOST);
  } finally {
    reader.cancel().catch(() => {});
  }
}
