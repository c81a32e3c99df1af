package consullock_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/hashicorp/consul/api"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock/internal/locktest"
)

// link is the HTTP transport of a client. Its wire has the faults.
type link struct {
	*locktest.Wire
	base http.RoundTripper
	url  string
}

// transactions are the requests that a dlocktest.Link disturbs. A client makes and renews sessions and reads entries before
// them, so a transaction whose reply is lost has been carried out.
var transactions = []string{"lock", "unlock", "check", "seal", "unlock+seal"}

func clientOver(tb testing.TB, l link) *api.Client {
	tb.Helper()
	c, err := api.NewClient(&api.Config{Address: l.url, HttpClient: &http.Client{Transport: l}})
	require.NoError(tb, err)
	return c
}

func (l link) RoundTrip(req *http.Request) (*http.Response, error) {
	var body []byte
	if req.Body != nil {
		var err error
		if body, err = io.ReadAll(req.Body); err != nil {
			return nil, err
		}
	}
	return locktest.Do(req.Context(), l.Wire, kind(req, body), func(ctx context.Context, answer string) (*http.Response, error) {
		if answer != "" { // a status and a body
			status, text, _ := strings.Cut(answer, " ")
			code, err := strconv.Atoi(status)
			return &http.Response{StatusCode: code, Request: req, Body: io.NopCloser(strings.NewReader(text)), Header: http.Header{
				"X-Consul-Index": {"1"}, "X-Consul-Lastcontact": {"0"}, "X-Consul-Results-Filtered-By-Acls": {"true"},
			}}, err
		}
		req := req.Clone(ctx)
		req.Body = io.NopCloser(bytes.NewReader(body))
		resp, err := l.base.RoundTrip(req)
		if err != nil {
			return nil, err
		}
		defer func() { _ = resp.Body.Close() }()
		text, err := io.ReadAll(resp.Body)
		resp.Body = io.NopCloser(bytes.NewReader(text))
		return resp, err
	})
}

// kind is what a request is for: create, renew, destroy or watch a session; read an entry or poll it; or a transaction.
func kind(req *http.Request, body []byte) string {
	path := strings.Split(strings.TrimPrefix(req.URL.Path, "/v1/"), "/")
	switch {
	case path[0] == "session" && path[1] == "info":
		return "watch"
	case path[0] == "session":
		return path[1]
	case req.URL.Query().Has("index"):
		return "poll"
	case path[0] == "kv":
		return "read"
	}
	var ops api.TxnOps
	_ = json.Unmarshal(body, &ops)
	k := "check"
	for _, op := range ops {
		switch seals := strings.Contains(op.KV.Key, "=session/"); {
		case op.KV.Verb == api.KVDelete:
			k = "unlock"
		case op.KV.Verb == api.KVLock && !seals:
			k = "lock"
		case op.KV.Verb == api.KVLock && k == "unlock":
			k = "unlock+seal"
		case op.KV.Verb == api.KVLock:
			k = "seal"
		}
	}
	return k
}
