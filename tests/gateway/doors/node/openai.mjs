// The official client against a server: node openai.mjs URL MODEL. Prints what it received as JSON.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const asked = {
  model,
  messages: [{ role: "user", content: "What is 12 + 30?" }],
  temperature: 0,
  max_tokens: 40,
};
const schema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 8 }, days: { enum: [1, 2] } },
  required: ["city", "days"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", parameters: schema, strict: true } }];

const whole = await client.chat.completions.create({ ...asked, logprobs: true, top_logprobs: 2 });
const text = whole.choices[0].message.content;
const { content } = whole.choices[0].logprobs;
assert.equal(content.length, whole.usage.completion_tokens);
assert.ok(content.every((token) => token.top_logprobs.length === 2 && token.logprob <= 0));
const bytes = content.flatMap((token) => token.bytes);
assert.ok(Buffer.from(bytes).toString().startsWith(text));

const stream = client.chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
let streamed = "";
stream.on("content", (delta) => (streamed += delta));
const final = await stream.finalChatCompletion();
assert.equal(streamed, text);
assert.equal(final.choices[0].message.content, text);
assert.equal((await stream.totalUsage()).total_tokens, final.usage.total_tokens);
assert.equal(final.usage.completion_tokens, whole.usage.completion_tokens);

const choices = await client.chat.completions.create({ ...asked, n: 3, seed: 7, temperature: 1 });
assert.deepEqual(choices.choices.map((choice) => choice.index), [0, 1, 2]);

const form = { type: "json_schema", json_schema: { name: "trip", schema, strict: true } };
const parsed = await client.chat.completions.parse({ ...asked, max_tokens: 200, response_format: form });

const required = { ...asked, max_tokens: 200, tools, tool_choice: "required", parallel_tool_calls: false };
const called = (await client.chat.completions.parse(required)).choices[0];
assert.equal(called.finish_reason, "tool_calls");
const [call] = called.message.tool_calls;
const calling = await client.chat.completions.stream(required).finalChatCompletion();
const [again] = calling.choices[0].message.tool_calls;
assert.deepEqual(again.function, call.function);
const answered = await client.chat.completions.create({
  ...asked,
  tools,
  messages: [
    ...asked.messages,
    called.message,
    { role: "tool", tool_call_id: call.id, content: "42" },
    calling.choices[0].message,
    { role: "tool", tool_call_id: again.id, content: "42" },
  ],
});

const wanted = { model, input: "What is 12 + 30?", temperature: 0, max_output_tokens: 40 };
const response = await client.responses.create(wanted);
const events = client.responses.stream(wanted);
const kinds = new Set();
for await (const event of events) kinds.add(event.type);
assert.equal((await events.finalResponse()).output_text, response.output_text);
const next = await client.responses.create({
  ...wanted, input: "And 2 more?", previous_response_id: response.id,
});
const responded = await client.responses.create({
  ...wanted,
  max_output_tokens: 200,
  tools: [{ type: "function", name: "weather", parameters: schema, strict: true }],
  tool_choice: "required",
  parallel_tool_calls: false,
});
const [item] = responded.output;
assert.equal(item.type, "function_call");
const output = { type: "function_call_output", call_id: item.call_id, output: "sunny" };
const follow = [{ role: "user", content: wanted.input }, ...responded.output, output];
await client.responses.create({ ...wanted, input: follow });

const completion = await client.completions.create({ model, prompt: "12 + 30 =", max_tokens: 5, temperature: 0 });
assert.ok((await client.models.list()).data.some((entry) => entry.id === model));
const ended = await client.chat.completions.create({ ...asked, max_tokens: 300, stream: true });
for await (const chunk of ended) if (chunk.choices[0]?.delta.content) break; // ends the request
const embedded = await client.embeddings.create({ model, input: ["a", "b"] });
assert.ok(embedded.data.every((entry) => entry.embedding.length > 0 && Number.isFinite(entry.embedding[0])));
const wrong = await client.chat.completions.create({ ...asked, temperature: -1 }).catch((error) => error);
assert.ok(wrong instanceof OpenAI.BadRequestError);
assert.equal(wrong.param, "temperature");

console.log(
  JSON.stringify({
    text,
    logprobs: content.map((token) => token.logprob),
    choices: choices.choices.map((choice) => choice.message.content),
    parsed: parsed.choices[0].message.parsed,
    call: { name: call.function.name, arguments: call.function.parsed_arguments },
    answered: answered.choices[0].message.content,
    response: response.output_text,
    kinds: [...kinds],
    next: next.output_text,
    responded: JSON.parse(item.arguments),
    completion: completion.choices[0].text,
  }),
);
