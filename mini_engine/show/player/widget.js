// The player as a Jupyter widget (anywidget): its model has the payload, the step and the followed request.

export default {
  render({ model, el: box }) {
    const theme = () => { // that of JupyterLab or VS Code; elsewhere the system's
      const { jpThemeLight, vscodeThemeKind = "" } = document.body.dataset;
      return jpThemeLight ? (jpThemeLight === "true" ? "light" : "dark") : vscodeThemeKind.match(/light|dark/)?.[0] ?? null;
    };
    const player = new Player(box, {
      embedded: true,
      onMove({ step, follow }) {
        model.set({ step, follow });
        model.save_changes();
      },
    });
    const load = () => player.load({ theme: theme(), ...model.get("payload") });
    const move = () => player.goTo({ step: model.get("step"), follow: model.get("follow") });
    const watch = new MutationObserver(() => player.theme(theme()));
    watch.observe(document.body, { attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind"] });
    load();
    move();
    const reload = () => {
      load();
      model.set({ follow: player.followed }); // the request on which two runs part, if the payload names none
      model.save_changes();
    };
    model.on("change:payload", reload);
    model.on("change:step change:follow", move);
    return () => {
      watch.disconnect();
      model.off("change:payload", reload);
      model.off("change:step change:follow", move);
      player.destroy();
    };
  },
};
