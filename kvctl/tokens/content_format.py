"""Does a chat template want a message's content as text, or as a list of parts?

The engine decides by the template's syntax tree (its ``--chat-template-content-format auto``): a loop over a
message's content means parts, everything else text. The same question is answered here, from the tree alone:
names that hold the messages, loops over them, and loops over the content of what those yield, also where
content reaches a macro as an argument.
"""

from collections.abc import Iterator

from jinja2 import nodes


def wants_parts(tree: nodes.Template) -> bool:
    """Whether the template iterates over the content of a message."""
    messages = _loop_targets(tree, _aliases(tree, "messages"))
    inside_macros: set[int] = set()
    for macro in tree.find_all(nodes.Macro):
        given = _parameters_given_content(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            inside_macros.add(id(loop))
            if isinstance(loop.iter, nodes.Name) and loop.iter.name in given:
                return True
    return any(
        any(_reads(loop.iter, name, "content") for name in messages)
        or (
            id(loop) not in inside_macros
            and isinstance(loop.iter, nodes.Name)
            and loop.iter.name == "content"
        )
        for loop in tree.find_all(nodes.For)
    )


def _aliases(tree: nodes.Template, name: str) -> set[str]:
    """``name`` and all names that are assigned from it, or from a slice or filter of it."""
    found, queue = {name}, [name]
    while queue:
        current = queue.pop()
        for assign in tree.find_all(nodes.Assign):
            target = assign.target
            if isinstance(target, nodes.Name) and target.name not in found and _reads(assign.node, current):
                found.add(target.name)
                queue.append(target.name)
    return found


def _loop_targets(tree: nodes.Template, sources: set[str]) -> set[str]:
    return {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in sources)
    }


def _parameters_given_content(tree: nodes.Template, macro: nodes.Macro, messages: set[str]) -> set[str]:
    """Parameters of ``macro`` that some call binds to the content of a message."""
    names = [argument.name for argument in macro.args]
    given = set()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            for name, value in _bound(call, names):
                if any(_reads(value, message, "content") for message in messages):
                    given.add(name)
    return given


def _bound(call: nodes.Call, names: list[str]) -> Iterator[tuple[str, nodes.Node]]:
    yield from zip(names, call.args, strict=False)
    for keyword in call.kwargs:
        if keyword.key in names:
            yield keyword.key, keyword.value


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether ``node`` is ``name`` (or ``name.key``), also through filters, tests and slices."""
    if isinstance(node, (nodes.Filter, nodes.Test)):
        return _reads(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, name, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == key and _reads_plain(node.node, name)
    return isinstance(node, nodes.Getattr) and node.attr == key and _reads_plain(node.node, name)


def _reads_plain(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
