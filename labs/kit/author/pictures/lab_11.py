"""lab-11: the turns of the engine's thread below the event loop, and one script on three fronts."""

from typing import Any

from labs.kit.author.pictures.sheet import LINE, OCHRE, PAPER, Sheet, solution
from labs.kit.judge import loading
from labs.kit.judge.manifest import find_lab
from mini_engine.show.figures import style

COLOURS = {"a": style.BLUE, "b": style.GREEN}


def played(part: Any, *ops: tuple[Any, ...]) -> dict[str, Any]:
    """Return what can be seen after the last of some calls on a front."""
    scenarios = loading.load("lab-11", "scenarios")
    seen: dict[str, Any] = scenarios.run(part, scenarios.scenario("", *ops)).steps[-1].observed
    return seen


def tokens(seen: dict[str, Any], name: str) -> list[tuple[str, float]]:
    """Return a client's Deltas, each with its time in seconds."""
    pairs = [line.split(" at ") for line in seen["read"].get(name, [])]
    return [(text, float(when.split()[0])) for text, when in pairs]


def turns(sheet: Sheet) -> None:
    """Two clients: one comes in the middle of a step, the other leaves in the middle of one."""
    came, left = 0.14, 0.27
    ops = [("open", "a", "r1", 9), ("wait", came), ("open", "b", "r2", 3), ("wait", left - came)]
    seen = played(solution("lab-11"), *ops, ("leave", "a"), ("wait", 0.24))
    x0, second = 132.0, 1020.0

    def at(time: float) -> float:
        return x0 + time * second

    sheet.title(18, 24, "all commands that have come, then one step")
    for y, words in ((64, "client a"), (96, "client b"), (148, "event loop"), (222, "engine's thread")):
        sheet.text(18, y, words)
    sheet.box(at(0) - 8, 132, 0.52 * second + 16, 30, face="#EEF3F7", edge=LINE)
    rows = {"a": 64, "b": 96}
    for number in range(5):
        size, words = (0.1 * second - 3, 36), f"step {number + 1}"
        sheet.box(at(number / 10), 204, *size, words, face="#F3E3C3", edge=OCHRE)
    for name, y in rows.items():
        for text, time in tokens(seen, name):
            sheet.arrow((at(time) - 2, 203), (at(time) - 2, y + 11), colour=COLOURS[name])
            sheet.box(at(time) - 16, y - 11, 28, 20, text, face="white", edge=COLOURS[name])
    commands = ((0.0, 0.0, "add a", "a"), (came, 0.2, "add b", "b"), (left, 0.3, "abort a", "a"))
    for sent, done, words, name in commands:
        sheet.arrow((at(sent), rows[name] + 2), (at(sent), 134), colour=COLOURS[name], dashed=True)
        side = ("right", -5) if sent == left else ("left", 5)
        sheet.text(at(sent) + side[1], 148, words, colour=COLOURS[name], weight="bold", ha=side[0])
        sheet.arrow((at(sent), 161), (at(done), 203), colour=COLOURS[name])
    sheet.note(at(0) + 6, 64, "comes")
    sheet.note(at(left) + 6, 64, "leaves")
    sheet.note(at(came) + 6, 96, "comes")
    for number in range(6):
        sheet.label(at(number / 10), 258, f"{number / 10:.1f} s")
    cost = f"{seen['tokens computed']['a']} tokens are computed for a."
    sheet.note(18, 284, f"{cost} The step in which it leaves is the last one with it.")


def three_fronts(sheet: Sheet) -> None:
    """One script, played on the reference and on two known mistakes."""
    lab = find_lab("lab-11")
    known = {mistake.id: mistake for mistake in lab.mistakes}
    fronts = [
        ("the reference", solution("lab-11")),
        ("self.work is cleared after the turn", loading.mistaken(lab, known["lost-wake-up"])),
        ("the step runs in the event loop", loading.mistaken(lab, known["turn-in-the-event-loop"])),
    ]
    ops = [("open", "a", "r1", 2), ("wait", 0.14), ("open", "b", "r2", 2), ("drain",)]
    x0, second = 132.0, 960.0
    for row, (title, part) in enumerate(fronts):
        seen, y = played(part, *ops), 26 + row * 88
        sheet.title(18, y, title)
        for name, line in (("a", y + 26), ("b", y + 52)):
            sheet.text(18, line, f"client {name}")
            sheet.ax.plot([x0, x0 + 0.52 * second], [line, line], color=LINE, lw=0.8, zorder=0)
            read: dict[float, list[str]] = {}
            for text, time in tokens(seen, name):
                read.setdefault(time, []).append(text)
            for time, texts in read.items():
                wide = 26 * len(texts)
                where = x0 + time * second - wide / 2
                sheet.box(where, line - 11, wide, 20, " ".join(texts), edge=COLOURS[name])
            if name == "b":
                sheet.note(x0 + 0.14 * second, line, "comes", ha="center", backgroundcolor=PAPER)
                if not read:
                    look: dict[str, Any] = {"colour": style.VERMILLION, "backgroundcolor": PAPER}
                    sheet.text(x0 + 0.24 * second, line, "waits for ever", **look)


PICTURES = {turns: 300, three_fronts: 278}  # and their heights
