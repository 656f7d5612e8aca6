// The AI SDK with its defaults, which are the Responses API. Prints what it got as JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name] = process.argv.slice(2);
const model = createOpenAI({ baseURL, apiKey: "none" })(name);
const found = { asked: [] };
const tools = {
  weather: tool({
    description: "What it is like outside",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      found.asked.push(city);
      return "sunny";
    },
  }),
};

found.text = (await generateText({ model, prompt: "Count." })).text;

const looped = await generateText({ model, prompt: "What is the weather?", tools, stopWhen: stepCountIs(4) });
found.looped = looped.text;

const streamed = streamText({ model, prompt: "What is the weather?", tools, stopWhen: stepCountIs(4) });
found.streamed = "";
for await (const piece of streamed.textStream) found.streamed += piece;
found.finishReason = await streamed.finishReason;
found.tokens = (await streamed.totalUsage).outputTokens;

const messages = [{ role: "user", content: "Hello." }];
const first = await generateText({ model, messages });
messages.push(...first.response.messages, { role: "user", content: "Again." });
found.conversation = (await generateText({ model, messages })).text;

found.object = (
  await generateObject({ model, prompt: "Describe Köln.", schema: z.object({ city: z.string() }) })
).object;

const thought = await generateText({
  model,
  prompt: "Think.",
  providerOptions: { openai: { reasoningSummary: "auto", forceReasoning: true } },
});
found.thought = [thought.reasoningText, thought.text];

console.log(JSON.stringify(found));
