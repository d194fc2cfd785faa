"""An SVG for light and dark pages: what its colours become where the reader's system is dark."""

import colorsys
import re

COLOUR = re.compile(r"\b(fill|stroke)(: ?|=\")(#[0-9a-fA-F]{6}|#[0-9a-fA-F]{3})\b")
LONG = re.compile(r"(?<![\w.])(-?[1-9]\d*\.\d\d)\d+")
# Of points of a path in one column or one row, those between the first and the last.
BETWEEN = re.compile(r"(L (?P<x>\S+) \S+ \n)(?:L (?P=x) \S+ \n)+(?=L (?P=x) \S+ \n)")
AMONG = re.compile(r"(L \S+ (?P<y>\S+) \n)(?:L \S+ (?P=y) \n)+(?=L \S+ (?P=y) \n)")
PAIR = 1.05 * 0.058  # a colour's luminance times that of its counterpart: white becomes nearly black


def with_dark_palette(svg: str) -> str:
    """Return an SVG whose colours follow the reader's: the same hues, with light and dark exchanged.

    The contrast of any two colours is kept, so text on a cell stays as legible as it was. Coordinates of a
    hundredth of a unit are enough, of a straight line its two ends, and no line break is needed.
    """
    svg = AMONG.sub(r"\1", BETWEEN.sub(r"\1", LONG.sub(r"\1", svg)))
    rules = ["svg{fill:#efefef}"]  # what has no colour is black
    for kind, sign, colour in sorted(set(COLOUR.findall(svg))):
        found = f'{kind}="{colour}"' if "=" in sign else f'style*="{kind}{sign}{colour}"'
        rules.append(f"[{found}]{{{kind}:{counterpart(colour)}!important}}")
    style = f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>"
    svg = re.sub(r"<svg\b[^>]*>", lambda found: found[0] + style, svg, count=1)
    return re.sub(r"\s*\n\s*", " ", svg).strip() + "\n"


def counterpart(colour: str) -> str:
    """Return the colour of the same hue whose luminance is as far from black as this one's is from white."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    hue, _, saturation = colorsys.rgb_to_hls(red, green, blue)
    if max(red, green, blue) - min(red, green, blue) < 0.05:
        saturation = 0  # a shade of grey stays one
    wanted = min(PAIR / (luminance((red, green, blue)) + 0.05) - 0.05, 1)
    low, high = 0.0, 1.0
    for _ in range(20):  # luminance grows with lightness
        middle = (low + high) / 2
        too_dark = luminance(colorsys.hls_to_rgb(hue, middle, saturation)) < wanted
        low, high = (middle, high) if too_dark else (low, middle)
    return "#" + "".join(f"{round(255 * one):02x}" for one in colorsys.hls_to_rgb(hue, high, saturation))


def luminance(rgb: tuple[float, float, float]) -> float:
    """Return the relative luminance, as WCAG 2 defines it."""
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in rgb)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
