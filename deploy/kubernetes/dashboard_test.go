package kubernetes_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/prometheus/promql/parser"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

// dashboard has the fields of Grafana's model that fencelab.json uses.
type dashboard struct {
	UID           string   `json:"uid"`
	Title         string   `json:"title"`
	Tags          []string `json:"tags"`
	SchemaVersion int      `json:"schemaVersion"`
	Version       int      `json:"version"`
	Editable      bool     `json:"editable"`
	Refresh       string   `json:"refresh"`
	Timezone      string   `json:"timezone"`
	GraphTooltip  int      `json:"graphTooltip"`
	Time          struct {
		From string `json:"from"`
		To   string `json:"to"`
	} `json:"time"`
	Templating struct {
		List []struct {
			Name  string `json:"name"`
			Type  string `json:"type"`
			Query string `json:"query"`
			Label string `json:"label"`
		} `json:"list"`
	} `json:"templating"`
	Panels []panel `json:"panels"`
}

type panel struct {
	ID          int             `json:"id"`
	Type        string          `json:"type"`
	Title       string          `json:"title"`
	Description string          `json:"description"`
	Collapsed   bool            `json:"collapsed"`
	Panels      []panel         `json:"panels"`
	Datasource  source          `json:"datasource"`
	FieldConfig json.RawMessage `json:"fieldConfig"`
	Options     json.RawMessage `json:"options"`
	GridPos     struct{ H, W, X, Y int }
	Targets     []struct {
		RefID        string `json:"refId"`
		Datasource   source `json:"datasource"`
		Expr         string `json:"expr"`
		LegendFormat string `json:"legendFormat"`
		Range        bool   `json:"range"`
	} `json:"targets"`
}

type source struct {
	Type string `json:"type"`
	UID  string `json:"uid"`
}

const grafana = "../grafana"

// readDashboard refuses unknown fields.
func readDashboard(t *testing.T) *dashboard {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(grafana, "fencelab.json"))
	require.NoError(t, err)
	decoder := json.NewDecoder(bytes.NewReader(b))
	decoder.DisallowUnknownFields()
	d := &dashboard{}
	require.NoError(t, decoder.Decode(d))
	return d
}

// atInterval fills in Grafana's own variable.
func atInterval(expr, interval string) string {
	return strings.ReplaceAll(expr, "$__rate_interval", interval)
}

func TestDashboard(t *testing.T) {
	d := readDashboard(t)
	require.Len(t, d.Templating.List, 1)
	variable := "${" + d.Templating.List[0].Name + "}"
	require.Equal(t, "datasource", d.Templating.List[0].Type)
	ids := map[int]bool{}
	type cell struct{ x, y int }
	taken := map[cell]string{}
	for _, p := range d.Panels {
		require.False(t, ids[p.ID], "%s: id %d is there twice", p.Title, p.ID)
		ids[p.ID] = true
		require.NotEmpty(t, p.Title)
		require.LessOrEqual(t, p.GridPos.X+p.GridPos.W, 24, "%s is wider than the page", p.Title)
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				at := cell{p.GridPos.X + x, p.GridPos.Y + y}
				require.Empty(t, taken[at], "%s lies over %s", p.Title, taken[at])
				taken[at] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		require.Equal(t, "timeseries", p.Type)
		require.NotEmpty(t, p.Description, p.Title)
		require.NotEmpty(t, p.Targets, p.Title)
		refs := map[string]bool{}
		for _, q := range p.Targets {
			require.False(t, refs[q.RefID], "%s: query %s is there twice", p.Title, q.RefID)
			refs[q.RefID] = true
			require.Equal(t, source{"prometheus", variable}, q.Datasource)
			_, err := parser.ParseExpr(atInterval(q.Expr, "4s"))
			require.NoError(t, err, "%s: %s", p.Title, q.Expr)
		}
	}
}

// TestProvisioning: Grafana finds the dashboard, and the dashboard the data.
func TestProvisioning(t *testing.T) {
	read := func(file string, v any) {
		t.Helper()
		b, err := os.ReadFile(file)
		require.NoError(t, err)
		require.NoError(t, yaml.UnmarshalStrict(b, v), file)
	}
	var sources struct {
		APIVersion  int `json:"apiVersion"`
		Datasources []struct {
			Name      string            `json:"name"`
			UID       string            `json:"uid"`
			Type      string            `json:"type"`
			Access    string            `json:"access"`
			URL       string            `json:"url"`
			IsDefault bool              `json:"isDefault"`
			JSONData  map[string]string `json:"jsonData"`
		} `json:"datasources"`
	}
	read(filepath.Join(grafana, "datasource.yaml"), &sources)
	var providers struct {
		APIVersion int `json:"apiVersion"`
		Providers  []struct {
			Name    string            `json:"name"`
			Type    string            `json:"type"`
			Options map[string]string `json:"options"`
		} `json:"providers"`
	}
	read(filepath.Join(grafana, "dashboards.yaml"), &providers)
	var compose struct {
		Services map[string]struct {
			Image   string   `json:"image"`
			Volumes []string `json:"volumes"`
		} `json:"services"`
	}
	b, err := os.ReadFile("../compose.yaml")
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(b, &compose)) // compose itself knows its fields
	service, _, _ := strings.Cut(strings.TrimPrefix(sources.Datasources[0].URL, "http://"), ":")
	require.Contains(t, compose.Services, service)
	var dashboards string
	for _, v := range compose.Services["grafana"].Volumes {
		part := strings.Split(v, ":")
		require.FileExists(t, filepath.Join("..", part[0]))
		if filepath.Base(part[0]) == "fencelab.json" {
			dashboards = filepath.Dir(part[1])
		}
	}
	require.Equal(t, dashboards, providers.Providers[0].Options["path"])
}
