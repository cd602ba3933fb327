"""Renders the chart with Helm's own engine (helm-python-sdk, the Helm SDK behind a C interface).

Without arguments: reads a JSON list of values, prints a JSON list with, for each, `objects` (each file's text, in the
order of installation), or `error`; and `lint`, what Helm's linter finds, with its severity.

With --manifest: prints deploy/manifests/redirector.yaml: the chart's defaults, and the namespace.
"""

import json
import pathlib
import sys

import helm_python as helm

CHART = pathlib.Path(__file__).parents[2] / "deploy/chart/redirector"
RELEASE = {"name": "redirector", "namespace": "redirector-system"}
# Helm installs by kind; so does the plain manifest, which kubectl applies from top to bottom.
ORDER = [
    "namespace",
    "resourcequota",
    "networkpolicy",
    "serviceaccount",
    "configmap",
    "rbac",
    "daemonset",
    "monitoring",
]
HEAD = """\
# Made from deploy/chart/redirector, with its defaults and the namespace; do not edit. How: docs/kubernetes.md.
"""


def rendered(chart, values):
    files = chart.render(values, **RELEASE)
    texts = {}
    for path, text in files.items():
        name = pathlib.PurePath(path).stem
        if name != "NOTES":
            texts[name] = text.strip().removeprefix("---").strip()
    unknown = set(texts) - set(ORDER)
    if unknown:
        sys.exit(f"{unknown}: name these templates in ORDER")
    return [texts[name] for name in ORDER if texts[name]]


def case(chart, values):
    try:
        return {"objects": rendered(chart, values), "lint": helm.lint(CHART, values, namespace=RELEASE["namespace"])["messages"]}
    except helm.HelmError as error:
        return {"error": str(error)}


def main():
    with helm.Chart.load(CHART) as chart:
        if sys.argv[1:] == ["--manifest"]:
            objects = rendered(chart, {"namespace": {"create": True}})
            print(HEAD + "---\n" + "\n---\n".join(objects))
        else:
            json.dump([case(chart, values) for values in json.load(sys.stdin)], sys.stdout)


main()
