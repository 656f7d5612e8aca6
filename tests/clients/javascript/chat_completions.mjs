// OpenAI's client over chat completions: whole, streamed, parsed, with a tool. Prints what it got as JSON.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const asked = { model, temperature: 0, max_tokens: 48 };
const messages = [{ role: "user", content: "What is the capital of France?" }];
const found = {};

found.models = [];
for await (const one of client.models.list()) found.models.push(one.id);

found.whole = (await client.chat.completions.create({ ...asked, messages })).choices[0].message.content;

found.streamed = "";
const chunks = await client.chat.completions.create({ ...asked, messages, stream: true });
for await (const chunk of chunks) found.streamed += chunk.choices[0]?.delta.content ?? "";

const stream = client.chat.completions.stream({ ...asked, messages });
found.final = await stream.finalContent();

const City = z.object({ name: z.string().max(20), continent: z.enum(["Africa", "Asia", "Europe"]) });
const parsed = await client.chat.completions.parse({
  ...asked,
  messages,
  response_format: zodResponseFormat(City, "city"),
});
found.parsed = parsed.choices[0].message.parsed;

const tools = [
  {
    type: "function",
    function: {
      name: "weather",
      description: "Tells the weather of a city.",
      parameters: {
        type: "object",
        properties: { city: { type: "string", maxLength: 40 } },
        required: ["city"],
        additionalProperties: false,
      },
    },
  },
];
const talk = [{ role: "user", content: "What is the weather in Paris?" }];
const choice = { type: "function", function: { name: "weather" } };
const called = await client.chat.completions.create({ ...asked, messages: talk, tools, tool_choice: choice });
const call = called.choices[0].message.tool_calls[0];
found.arguments = JSON.parse(call.function.arguments);
talk.push(called.choices[0].message, { role: "tool", tool_call_id: call.id, content: "Sunny, 21 degrees." });
found.told = (
  await client.chat.completions.create({ ...asked, messages: talk, tools, tool_choice: "none" })
).choices[0].message.content;

const streamedCall = client.chat.completions.stream({
  ...asked,
  messages: [{ role: "user", content: "What is the weather in Paris?" }],
  tools,
  tool_choice: choice,
});
found.streamedArguments = JSON.parse((await streamedCall.finalMessage()).tool_calls[0].function.arguments);

const texts = await client.completions.create({ ...asked, prompt: "The capital of France is" });
found.continued = texts.choices[0].text;

try {
  await client.chat.completions.create({ ...asked, model: "no-such-model", messages });
} catch (error) {
  found.unknown = [error.status, error.constructor.name];
}

console.log(JSON.stringify(found));
