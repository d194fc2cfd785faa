// The editor: CodeMirror with Python, in a shadow root, where its style needs no inline style element.
import { basicSetup } from "codemirror";
import { EditorView, keymap } from "@codemirror/view";
import { EditorSelection, EditorState } from "@codemirror/state";
import { indentLess, indentMore, indentWithTab, isolateHistory, undo } from "@codemirror/commands";
import { HighlightStyle, indentUnit, syntaxHighlighting } from "@codemirror/language";
import { python } from "@codemirror/lang-python";
import { setDiagnostics } from "@codemirror/lint";
import { tags } from "@lezer/highlight";

const style = HighlightStyle.define([
  { tag: [tags.keyword, tags.operatorKeyword, tags.controlKeyword], color: "var(--keyword)" },
  { tag: [tags.string, tags.docString], color: "var(--string)" },
  { tag: [tags.number, tags.bool, tags.null], color: "var(--number)" },
  { tag: tags.comment, color: "var(--muted)", fontStyle: "italic" },
  { tag: [tags.function(tags.definition(tags.variableName)), tags.definition(tags.className)], color: "var(--defined)", fontWeight: "600" },
]);
const theme = EditorView.theme({
  "&": { height: "100%", color: "var(--ink)", backgroundColor: "var(--card)", fontSize: "13.5px" },
  "&.cm-focused": { outline: "none" }, // the page draws the ring, around the gutter too
  ".cm-scroller": { fontFamily: "var(--mono)", lineHeight: "1.5" },
  ".cm-content": { caretColor: "var(--ink)" },
  ".cm-cursor": { borderLeftColor: "var(--ink)" },
  ".cm-gutters": { backgroundColor: "var(--card)", color: "var(--muted)", borderRight: "1px solid var(--line)" },
  ".cm-activeLine, .cm-activeLineGutter": { backgroundColor: "var(--active)" },
  "&.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground, .cm-selectionBackground": { backgroundColor: "var(--selected)" },
  ".cm-panels, .cm-tooltip": { backgroundColor: "var(--page)", color: "var(--ink)", borderColor: "var(--line)" },
  ".cm-matchingBracket": { backgroundColor: "var(--selected)" },
  ".cm-foldPlaceholder": { backgroundColor: "var(--active)", color: "var(--muted)", borderColor: "var(--line)" },
});

export function makeEditor(parent, doc, { run, changed, label = "starter.py: your code" }) {
  const root = parent.attachShadow({ mode: "open" });
  const view = new EditorView({
    parent: root,
    root,
    state: EditorState.create({
      doc,
      extensions: [
        keymap.of([{ key: "Mod-Enter", run: () => (run(), true) }, indentWithTab]),
        basicSetup, python(), indentUnit.of("    "), EditorState.tabSize.of(4),
        syntaxHighlighting(style), theme, EditorView.lineWrapping,
        EditorView.contentAttributes.of({ "aria-label": label, tabindex: "0" }),
        EditorView.updateListener.of((update) => update.docChanged && changed(update.state.doc.toString())),
      ],
    }),
  });
  const now = () => view.state.doc;
  return {
    view,
    get text() { return now().toString(); },
    /** One change, so that undo takes it back. */
    set text(text) { view.dispatch({ changes: { from: 0, to: now().length, insert: text }, annotations: isolateHistory.of("full") }); },
    /** Underline a line, with words; none without a line. */
    mark(number, message) {
      const line = number && number <= now().lines ? now().line(number) : null;
      const marks = line ? [{ from: line.from, to: line.to, severity: "error", message }] : [];
      view.dispatch(setDiagnostics(view.state, marks));
    },
    /** Put a text at the cursor, or a pair around what is selected. */
    type(open, close = "") {
      view.dispatch(view.state.changeByRange(({ from, to }) => ({
        changes: [{ from, insert: open }, { from: to, insert: close }],
        range: EditorSelection.range(from + open.length, to + open.length),
      })), { userEvent: "input.type", scrollIntoView: true });
      view.focus();
    },
    command(name) {
      ({ indentMore, indentLess, undo })[name](view);
      view.focus();
    },
    go(number) {
      const { from } = now().line(Math.min(number, now().lines));
      view.dispatch({ selection: { anchor: from }, effects: EditorView.scrollIntoView(from, { y: "center" }) });
      view.focus();
    },
  };
}
