"""Chat templates: programs of a checkpoint, which run in a process of their own.

What it is for: `minisgl.templates.render` is that process, which `minisgl.utils.helper` starts and
ends. It compiles templates and fills them, in jinja's sandbox. What it does not know: tokenizers,
requests. `minisgl.tokenizer.template` asks it. Read next:
`minisgl.templates.render`.
"""
