"""compressed-tensors' `quantization_config`: groups of targets, each with a scheme of its own."""

from __future__ import annotations

from minisgl.quantization.weight import PLAIN, Format
from minisgl_zoo.weights.cut import ALL
from minisgl_zoo.weights.fp4 import MX_GROUP, NV_GROUP
from minisgl_zoo.weights.methods import fp4_format, grouped_format, scaled_format
from minisgl_zoo.weights.rules import Method, Rule, Section, named, of_class


def _compressed_tensors(config: Section) -> list[Rule]:
    """Return the rules: ignored modules first, then modules by name, then modules by class."""
    if config.get("kv_cache_scheme") is not None:  # `--kv-cache-dtype` says whether it is used
        scheme = config.section("kv_cache_scheme")
        scheme.check("type", "float")
        scheme.check("num_bits", 8)
        scheme.check("symmetric", None, True)
    if config.get("sparsity_config"):
        config.section("sparsity_config").check("format", None, "dense")
    ignored = config.names("ignore")
    by_name, by_class = [], []
    for group in config.section("config_groups").sections():
        format = _format(config, group)
        targets = group.names("targets")
        by_name.append(Rule(matches=named(group, targets), format=format))
        by_class.append(Rule(matches=of_class(*targets), format=format))
    rules = [Rule(matches=named(config, ignored), format=PLAIN)]
    rules.append(Rule(matches=of_class(*ignored), format=PLAIN))
    return [*rules, *by_name, *by_class]


def _format(config: Section, group: Section) -> Format:
    """The format of a group's weights. Activations are not quantised, whatever the group says."""
    weights = group.section("weights")
    weights.check("type", "float", "int")
    weights.check("dynamic", None, False)
    kind = weights.get("type")
    if group.get("input_activations"):
        activations = group.section("input_activations")
        activations.check("type", kind)
        activations.check("num_bits", 8, 4)
    if kind == "float" and weights.get("num_bits") == 4:
        weights.check("strategy", "group", "tensor_group")
        is_mx = weights.get("strategy") == "group"
        weights.check("group_size", MX_GROUP if is_mx else NV_GROUP)
        return fp4_format("mxfp4-pack-quantized" if is_mx else "nvfp4-pack-quantized")
    if kind == "int" and (group.get("format") or config.get("format")) == "pack-quantized":
        return _packed(weights)
    weights.check("num_bits", 8)
    weights.check("symmetric", None, True)
    number = "fp8" if kind == "float" else "int8"
    if number == "int8":
        (group if group.get("format") else config).check("format", "int-quantized")
        weights.check("strategy", "tensor", "channel", "group")
    else:
        weights.check("strategy", "tensor", "channel", "block")
    strategy = weights.get("strategy")
    if strategy == "block":
        return scaled_format("fp8", weights.block("block_structure"))
    if strategy == "group":
        return scaled_format(number, (1, weights.size("group_size")))
    return scaled_format(number, (ALL, ALL) if strategy == "tensor" else (1, ALL))


def _packed(weights: Section) -> Format:
    """The format pack-quantized: integers packed in int32. With actorder "group" (or "dynamic") the
    groups are out of order; with "weight" (or "static") they are in order."""
    weights.check("num_bits", 4, 8)
    weights.check("strategy", "channel", "group")
    weights.check("symmetric", None, True, False)
    weights.check("actorder", None, False, "group", "dynamic", "weight", "static")
    is_row = weights.get("strategy") == "channel"
    return grouped_format(
        "compressed-tensors",
        weights.get("num_bits"),
        ALL if is_row else weights.size("group_size"),
        has_zero=weights.get("symmetric") is False,
        act_order=weights.get("actorder") in ("group", "dynamic"),
    )


COMPRESSED_TENSORS = Method(_compressed_tensors)
