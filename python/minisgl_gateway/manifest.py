"""The rows of this package (`minisgl.plugins`)."""

from __future__ import annotations

from typing import Final

from minisgl.plugins import Row

ROWS: Final = [
    Row(
        "commands", "chat", "minisgl_gateway.shell.command:chat",
        about="[MODEL]  chat with a model in this terminal",
    ),
    Row(
        "commands", "run", "minisgl_gateway.shell.command:run",
        about="[MODEL] [QUESTION]  print one answer; a pipe can ask, too",
    ),
    Row(
        "commands", "upgrade", "minisgl_gateway.upgrade.command:upgrade",
        about="[-- FLAGS]  a new server takes over a running one's port",
    ),
    Row("servers", "dry_run", "minisgl_gateway.dry_run:dry_run"),
    Row("servers", "json_lines", "minisgl_gateway.watch.json_lines:JsonFormatter"),
    Row("servers", "shell", "minisgl_gateway.shell.command:serve_with_shell"),
    Row(
        "commands", "pull", "minisgl_gateway.downloads:pull",
        about="MODEL  download ORG/REPO, or ORG/REPO:Q4_K_M for a GGUF file",
    ),
    Row(
        "commands", "list", "minisgl_gateway.downloads:show",
        about="  show the models that are downloaded",
    ),
    Row("commands", "rm", "minisgl_gateway.downloads:remove", about="MODEL  remove one of them"),
    Row(
        "commands", "route", "minisgl_gateway.router.serve:route",
        about="--replica URL ...  spread requests over several servers",
    ),
    Row(
        "commands", "gateway", "minisgl_gateway.upstream.serve:gateway",
        about="--upstream URL  other vendors' APIs before an OpenAI-like server",
    ),
    Row("keys", "ring", "minisgl_gateway.keys.ring:KeyRing"),
    Row("keys", "give_way", "minisgl_gateway.keys.preemption:give_way"),
    Row("keys", "guard", "minisgl_gateway.keys.guard:KeyGuard"),
    Row("error_forms", "/api/", "minisgl_gateway.error_forms:ollama_error"),
    Row("error_forms", "/v1/messages", "minisgl_gateway.error_forms:anthropic_error"),
    Row("start_lines", "spinner", "minisgl_gateway.start_lines:StartLines"),
    Row("start_lines", "ready", "minisgl_gateway.ready:ready_text"),
    Row("tokenizers", "codec", "minisgl_gateway.codec_answers:answer_codec"),
    Row("routes", "tokens", "minisgl_gateway.tokens:ROUTES"),
    Row("routes", "responses", "minisgl_gateway.responses.routes:ROUTES"),
    Row("routes", "anthropic", "minisgl_gateway.anthropic.routes:ROUTES"),
    Row("routes", "embeddings", "minisgl_gateway.pooling.embeddings:ROUTES"),
    Row("routes", "scores", "minisgl_gateway.pooling.scores:ROUTES"),
    Row("routes", "ollama_embed", "minisgl_gateway.ollama.embed:ROUTES"),
    Row("routes", "ollama", "minisgl_gateway.ollama.routes:ROUTES"),
    Row("routes", "ollama_models", "minisgl_gateway.ollama.models:ROUTES"),
    Row("routes", "profile", "minisgl_gateway.watch.profile:ROUTES"),
    Row("routes", "xray", "minisgl_gateway.watch.xray_route:ROUTES"),
    Row("routes", "lora", "minisgl_gateway.lora:ROUTES"),
    Row("routes", "replica", "minisgl_gateway.watch.replica:ROUTES"),
    Row("routes", "relayed", "minisgl_gateway.watch.relayed:ROUTES"),
    Row("routes", "page", "minisgl_gateway.page:ROUTES"),
    Row("request_headers", "x-minisgl-prefix", "minisgl_gateway.watch.replica:prefix_answer"),
    Row("prompt_watchers", "prefixes", "minisgl_gateway.watch.prefixes:prefix_watch"),
    Row("prompt_watchers", "otlp", "minisgl_gateway.watch.tracing:tracer_of"),
    Row("prompt_watchers", "requests", "minisgl_gateway.watch.request_log:request_log"),
    Row("checks", "options", "minisgl_gateway.early:check_options"),
    Row("checks", "checkpoint", "minisgl_gateway.early:check_checkpoint"),
    Row("loop_observers", "queue_wait", "minisgl_gateway.queue_wait:queue_wait_of"),
    Row("loop_observers", "status", "minisgl_gateway.watch.status_line:status_of"),
    Row("loop_observers", "log_steps", "minisgl_gateway.watch.observers:steps_of"),
    Row("loop_observers", "record", "minisgl_gateway.watch.observers:recording_of"),
    Row("loop_observers", "costs", "minisgl_gateway.watch.observers:costs_of"),
    Row("loop_observers", "profiles", "minisgl_gateway.watch.observers:profiles_of"),
    Row("loop_observers", "xray", "minisgl_gateway.watch.observers:watching_of"),
    Row("metrics", "server", "minisgl_gateway.watch.more_metrics:of_server"),
    Row("metrics", "other_names", "minisgl_gateway.watch.other_names:under_other_names"),
    Row("flag_hints", "other_engines", "minisgl_gateway.other_engines:answer"),
    Row("flag_hints", "other_commands", "minisgl_gateway.other_engines:instead_of"),
    Row("flag_hints", "fields", "minisgl_gateway.field_hints:hint"),
    Row("options", "server", "minisgl_gateway.args:GatewayArgs"),
    Row("servers", "restarting", "minisgl_gateway.restart:server_of"),
    Row("nodes", "gather", "minisgl_gateway.nodes.serve:gather"),
    Row("nodes", "serve", "minisgl_gateway.nodes.serve:serve_node"),
    Row("nodes", "tcp", "minisgl_gateway.nodes.store:meet_over_tcp"),
    Row("servers", "replicas", "minisgl_gateway.deploy.local:serve_replicas"),
]  # fmt: skip
