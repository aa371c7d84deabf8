// Requests for the X-ray to show: they begin alike, arrive one after the other and have different lengths.

import { modelName, streamChat } from "./client.js";

export const COUNT = 8;
const GAP_MS = 120;
const SYSTEM = "You are a helpful assistant. Answer the questions of the user as well as you can.";

/** Send them and wait for all answers, which are dropped. Throws ApiError if one fails. */
export async function sendDemo(key, signal) {
  const model = await modelName(key);
  const ask = async (index) => {
    await new Promise((resolve) => setTimeout(resolve, GAP_MS * index));
    const messages = [
      { role: "system", content: SYSTEM },
      { role: "user", content: `Count from ${9 * index + 1} to 100.` },
    ];
    const answer = streamChat({ model, messages, max_tokens: 400 }, { key, signal });
    while (!(await answer.next()).done);
  };
  await Promise.all(Array.from({ length: COUNT }, (_, index) => ask(index)));
}
