"""Ask a server with the built-in model through other projects' clients, and print a table.

    python -m venv clients
    clients/bin/pip install openai anthropic ollama litellm instructor llm langchain-openai \
        langchain-anthropic langchain-ollama llama-index-llms-openai-like mcp
    minisgl serve --port 1919 &
    clients/bin/python scripts/try_clients.py http://127.0.0.1:1919 > table.md

With `--embedder`, a server of an embedder is asked for embeddings and ranks, through openai,
ollama, cohere, langchain-openai, langchain-ollama, langchain-cohere, llama-index-embeddings-openai
and llama-index-embeddings-openai-like.

It does not import minisgl, so the clients have environments of their own: two of them, because
openai-agents and pydantic-ai-slim[openai,anthropic] need openai 3, and others openai 2. Names of
packages behind the URL choose among the cases. A cell is `ok` or the error. The table is in
docs/clients.md.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from typing import Any, Final

MODEL: Final = "minisgl-builtin"
QUESTION: Final = "What is 12 + 30?"

Case = Callable[[str], Any]


def expect(found: object, wanted: object = True) -> None:
    if (bool(found) if wanted is True else found) != wanted:
        raise AssertionError(f"got {found!r}")


def _openai(url: str) -> Any:
    return importlib.import_module("openai").OpenAI(base_url=f"{url}/v1", api_key="none")


MESSAGES: Final = [{"role": "user", "content": QUESTION}]
PLACE: Final = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}


def openai_chat(url: str) -> None:
    answer = _openai(url).chat.completions.create(model=MODEL, messages=MESSAGES)
    expect(answer.choices[0].message.content)


def openai_stream(url: str) -> None:
    stream = _openai(url).chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    expect("".join(chunk.choices[0].delta.content or "" for chunk in stream))


def openai_schema(url: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    answer = _openai(url).chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format=form
    )
    expect(json.loads(answer.choices[0].message.content)["city"] in ("Rome", "Oslo"))


def openai_tools(url: str) -> None:
    tool = {"type": "function", "function": {"name": "place", "parameters": PLACE}}
    answer = _openai(url).chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="required"
    )
    call, *_ = answer.choices[0].message.tool_calls
    expect(json.loads(call.function.arguments)["city"] in ("Rome", "Oslo"))


def openai_responses(url: str) -> None:
    client = _openai(url)
    first = client.responses.create(model=MODEL, input=QUESTION)
    with client.responses.stream(
        model=MODEL, input="And 2 more?", previous_response_id=first.id
    ) as stream:
        expect(stream.get_final_response().output_text)


def _anthropic(url: str) -> Any:
    return importlib.import_module("anthropic").Anthropic(base_url=url, api_key="none")


def anthropic_messages(url: str) -> None:
    client = _anthropic(url)
    expect(client.messages.create(model=MODEL, max_tokens=50, messages=MESSAGES).content[0].text)
    expect(client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens)


def anthropic_stream(url: str) -> None:
    with _anthropic(url).messages.stream(
        model=MODEL, max_tokens=50, messages=MESSAGES, system="Be brief."
    ) as stream:
        expect("".join(stream.text_stream))


def anthropic_tools(url: str) -> None:
    tool = {"name": "place", "input_schema": PLACE}
    answer = _anthropic(url).messages.create(
        model=MODEL, max_tokens=99, messages=MESSAGES, tools=[tool], tool_choice={"type": "any"}
    )
    expect(answer.content[-1].input["city"] in ("Rome", "Oslo"))


def ollama_chat(url: str) -> None:
    client = importlib.import_module("ollama").Client(host=url)
    expect(client.chat(MODEL, MESSAGES).message.content)
    expect("".join(part.response for part in client.generate(MODEL, QUESTION, stream=True)))
    expect(client.list().models[0].model, MODEL)


def _langchain(url: str) -> Any:
    module = importlib.import_module("langchain_openai")
    return module.ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL)


def langchain_invoke(url: str) -> None:
    model = _langchain(url)
    expect(model.invoke(QUESTION).content)
    expect("".join(str(chunk.content) for chunk in model.stream(QUESTION)))


def langchain_responses(url: str) -> None:
    module = importlib.import_module("langchain_openai")
    model = module.ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=MODEL, use_responses_api=True
    )
    expect(model.invoke(QUESTION).content)


def langchain_structured(method: str) -> Case:
    def case(url: str) -> None:
        schema = PLACE | {"title": "place", "description": "A place."}
        model = _langchain(url).with_structured_output(schema, method=method)
        expect("city" in model.invoke(f"{QUESTION} Answer in JSON.") or method == "json_mode")

    return case


def langchain_tools(url: str) -> None:
    tool = {"type": "function", "function": {"name": "place", "parameters": PLACE}}
    model = _langchain(url).bind_tools([tool], tool_choice="required")
    expect(model.invoke(QUESTION).tool_calls[0]["args"]["city"] in ("Rome", "Oslo"))


def langchain_anthropic(url: str) -> None:
    module = importlib.import_module("langchain_anthropic")
    model = module.ChatAnthropic(base_url=url, api_key="none", model=MODEL, max_tokens=50)
    expect(model.invoke(QUESTION).content)


def langchain_ollama(url: str) -> None:
    module = importlib.import_module("langchain_ollama")
    expect(module.ChatOllama(base_url=url, model=MODEL).invoke(QUESTION).content)


def llama_index(url: str) -> None:
    module = importlib.import_module("llama_index.llms.openai_like")
    model = module.OpenAILike(
        api_base=f"{url}/v1", api_key="none", model=MODEL, is_chat_model=True, context_window=1024
    )
    expect(model.complete(QUESTION).text)
    expect("".join(part.delta or "" for part in model.stream_complete(QUESTION)))


def litellm(prefix: str, path: str) -> Case:
    def case(url: str) -> None:
        module = importlib.import_module("litellm")
        answer = module.completion(
            model=f"{prefix}/{MODEL}",
            messages=MESSAGES,
            api_base=url + path,
            api_key="none",
            max_tokens=50,
        )
        expect(answer.choices[0].message.content)

    return case


def litellm_responses(url: str) -> None:
    module = importlib.import_module("litellm")
    answer = module.responses(
        model=f"openai/{MODEL}", input=QUESTION, api_base=f"{url}/v1", api_key="none"
    )
    expect(answer.output[0].content[0].text)


def instructor(mode: str) -> Case:
    def case(url: str) -> None:
        module = importlib.import_module("instructor")
        pydantic = importlib.import_module("pydantic")
        model = pydantic.create_model("Place", city=(_city(), ...), big=(bool, ...))
        client = module.from_openai(_openai(url), mode=getattr(module.Mode, mode))
        place = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_model=model, max_retries=0
        )
        expect(place.city in ("Rome", "Oslo"))

    return case


def _city() -> Any:
    from typing import Literal

    return Literal["Rome", "Oslo"]


def llm(url: str) -> None:
    module = importlib.import_module("llm.default_plugins.openai_models")
    model = module.Chat(MODEL, model_name=MODEL, api_base=f"{url}/v1")
    model.key = "none"
    expect(model.prompt(QUESTION).text())


def openai_agents(kind: str) -> Case:
    """A tool is called, its result sent back, and a typed answer asked for; then as a stream."""

    def case(url: str) -> None:
        agents, called = importlib.import_module("agents"), list[str]()
        agents.set_tracing_disabled(True)
        client = importlib.import_module("openai").AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        model = getattr(agents, kind)(model=MODEL, openai_client=client)

        def weather(city: str) -> str:
            called.append(city)
            return "sunny"

        settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False)
        tools = [agents.function_tool(weather)]
        caller = agents.Agent(name="a", model=model, tools=tools, model_settings=settings)
        typed = agents.Agent(name="b", model=model, output_type=_city())

        async def turns() -> None:
            expect((await agents.Runner.run(caller, QUESTION)).final_output)
            expect(len(called), 1)
            streamed = agents.Runner.run_streamed(caller, QUESTION)
            async for _ in streamed.stream_events():
                pass
            expect(streamed.final_output)
            expect((await agents.Runner.run(typed, QUESTION)).final_output in ("Rome", "Oslo"))

        importlib.import_module("asyncio").run(turns())

    return case


def pydantic_ai(module: str, kind: str, path: str) -> Case:
    """A typed answer, and a conversation of two turns."""

    def case(url: str) -> None:
        agent = importlib.import_module("pydantic_ai").Agent
        providers = importlib.import_module(f"pydantic_ai.providers.{module}")
        make = providers.OpenAIProvider if module == "openai" else providers.AnthropicProvider
        model = getattr(importlib.import_module(f"pydantic_ai.models.{module}"), kind)(
            MODEL, provider=make(base_url=url + path, api_key="none")
        )
        expect(agent(model, output_type=_city()).run_sync(QUESTION).output in ("Rome", "Oslo"))
        first = agent(model).run_sync(QUESTION)
        expect(agent(model).run_sync("And 2 more?", message_history=first.all_messages()).output)

    return case


# --- an embedder -------------------------------------------------------------------------------

TEXTS: Final = ["Beijing is the capital of China.", "Gravity pulls two bodies together."]
QUERY: Final = "What is the capital of China?"


def _served(url: str) -> str:
    name: str = _openai(url).models.list().data[0].id
    return name


def _close(found: list[list[float]], url: str) -> None:
    """Compare vectors with those of OpenAI's client, which asks for base64."""
    answer = _openai(url).embeddings.create(model=_served(url), input=TEXTS)
    for ours, data in zip(found, answer.data, strict=True):
        dot = sum(a * b for a, b in zip(ours, data.embedding, strict=True))
        expect(dot > 0.9999)


def openai_embeddings(url: str) -> None:
    client, name = _openai(url), _served(url)
    floats = client.embeddings.create(model=name, input=TEXTS, encoding_format="float")
    _close([each.embedding for each in floats.data], url)
    expect(len(client.embeddings.create(model=name, input=[[5, 6], [7]]).data), 2)
    expect(len(client.embeddings.create(model=name, input="a", dimensions=8).data[0].embedding), 8)


def ollama_embed(url: str) -> None:
    client, name = importlib.import_module("ollama").Client(host=url), _served(url)
    _close([list(each) for each in client.embed(name, TEXTS).embeddings], url)
    _close([list(client.embeddings(name, text).embedding) for text in TEXTS], url)


def cohere_rerank(version: int) -> Case:
    def case(url: str) -> None:
        module = importlib.import_module("cohere")
        client = (module.ClientV2 if version == 2 else module.Client)("none", base_url=url)
        answer = client.rerank(model=_served(url), query=QUERY, documents=TEXTS, top_n=1)
        expect([each.index for each in answer.results], [0])

    return case


def langchain_embeddings(package: str, kind: str, path: str, **options: Any) -> Case:
    def case(url: str) -> None:
        make = getattr(importlib.import_module(package), kind)
        model = make(base_url=url + path, model=_served(url), **options)
        _close(model.embed_documents(TEXTS), url)
        _close([model.embed_query(text) for text in TEXTS], url)

    return case


def langchain_rerank(url: str) -> None:
    module = importlib.import_module("langchain_cohere")
    document = importlib.import_module("langchain_core.documents").Document
    client = importlib.import_module("cohere").ClientV2("none", base_url=url)
    ranker = module.CohereRerank(client=client, model=_served(url), top_n=1, cohere_api_key="none")
    documents = [document(page_content=text) for text in reversed(TEXTS)]
    [best] = ranker.compress_documents(documents, QUERY)
    expect(best.page_content, TEXTS[0])


def llama_index_embeddings(package: str, kind: str) -> Case:
    def case(url: str) -> None:
        make = getattr(importlib.import_module(f"llama_index.embeddings.{package}"), kind)
        model = make(model_name=_served(url), api_base=f"{url}/v1", api_key="none")
        _close(model.get_text_embedding_batch(TEXTS), url)
        _close([model.get_query_embedding(text) for text in TEXTS], url)

    return case


EMBEDDER_CASES: Final[dict[str, dict[str, Case]]] = {
    "openai": {"embeddings": openai_embeddings},
    "ollama": {"embed, embeddings": ollama_embed},
    "cohere": {"rerank, ClientV2": cohere_rerank(2), "rerank, Client": cohere_rerank(1)},
    "langchain-openai": {
        "OpenAIEmbeddings, check_embedding_ctx_length=False": langchain_embeddings(
            "langchain_openai", "OpenAIEmbeddings", "/v1", check_embedding_ctx_length=False
        )
    },
    "langchain-ollama": {
        "OllamaEmbeddings": langchain_embeddings("langchain_ollama", "OllamaEmbeddings", "")
    },
    "langchain-cohere": {"CohereRerank": langchain_rerank},
    "llama-index-embeddings-openai": {
        "OpenAIEmbedding": llama_index_embeddings("openai", "OpenAIEmbedding")
    },
    "llama-index-embeddings-openai-like": {
        "OpenAILikeEmbedding": llama_index_embeddings("openai_like", "OpenAILikeEmbedding")
    },
}
CASES: Final[dict[str, dict[str, Case]]] = {
    "openai": {
        "chat": openai_chat,
        "stream": openai_stream,
        "JSON schema": openai_schema,
        "required tool": openai_tools,
        "Responses": openai_responses,
    },
    "anthropic": {
        "messages, count_tokens": anthropic_messages,
        "stream": anthropic_stream,
        "any tool": anthropic_tools,
    },
    "ollama": {"chat, generate, list": ollama_chat},
    "langchain-openai": {
        "invoke, stream": langchain_invoke,
        "Responses": langchain_responses,
        "with_structured_output, json_schema": langchain_structured("json_schema"),
        "with_structured_output, json_mode": langchain_structured("json_mode"),
        "with_structured_output, function_calling": langchain_structured("function_calling"),
        "bind_tools, required": langchain_tools,
    },
    "langchain-anthropic": {"invoke": langchain_anthropic},
    "langchain-ollama": {"invoke": langchain_ollama},
    "llama-index-llms-openai-like": {"complete, stream": llama_index},
    "litellm": {
        "openai/": litellm("openai", "/v1"),
        "anthropic/": litellm("anthropic", ""),
        "ollama_chat/": litellm("ollama_chat", ""),
        "Responses": litellm_responses,
    },
    "instructor": {"JSON schema": instructor("JSON_SCHEMA"), "tools": instructor("TOOLS")},
    "llm": {"prompt": llm},
    "openai-agents": {
        "tool, stream, output_type; Responses": openai_agents("OpenAIResponsesModel"),
        "likewise; chat": openai_agents("OpenAIChatCompletionsModel"),
    },
    "pydantic-ai-slim": {
        "output_type, two turns; chat": pydantic_ai("openai", "OpenAIChatModel", "/v1"),
        "likewise; Responses": pydantic_ai("openai", "OpenAIResponsesModel", "/v1"),
        "likewise; Anthropic": pydantic_ai("anthropic", "AnthropicModel", ""),
    },
}


def main(url: str, all_cases: dict[str, dict[str, Case]], *chosen: str) -> int:
    os.environ |= {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}
    os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}
    print("| client | what | result |\n|---|---|---|")
    num_failed = 0
    for package in chosen or all_cases:
        cases = all_cases[package]
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            print(f"| {package} | | not installed |")
            continue
        for what, case in cases.items():
            try:
                case(url)
                result = "ok"
            except Exception as error:
                num_failed += 1
                result = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            print(f"| {package} {version} | {what} | {result.replace('|', '/')} |", flush=True)
    return num_failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", help="address of a server with the built-in model")
    parser.add_argument("--embedder", action="store_true", help="the server has an embedder")
    names = [*CASES, *EMBEDDER_CASES]
    known = f"default: all of {' '.join(dict.fromkeys(names))}"
    parser.add_argument("packages", nargs="*", choices=[*names, []], metavar="PACKAGE", help=known)
    args = parser.parse_args()
    asked = EMBEDDER_CASES if args.embedder else CASES
    sys.exit(bool(main(args.url.rstrip("/"), asked, *args.packages)))
