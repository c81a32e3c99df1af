package scenarios

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// refusalsMetric is the headline number of a resource.
const refusalsMetric = "resource_stale_token_rejections_total"

// refusals reads the resource's count of stale tokens refused from its metrics.
func refusals(ctx context.Context, url string) (n int, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, err
	}
	transport := &http.Transport{DisableKeepAlives: true}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, resp.Body.Close()) }()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(resp.Body)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", url, err)
	}
	family := families[refusalsMetric]
	if family == nil {
		return 0, fmt.Errorf("%s has no %s", url, refusalsMetric)
	}
	for _, m := range family.GetMetric() {
		n += int(m.GetCounter().GetValue())
	}
	return n, nil
}
