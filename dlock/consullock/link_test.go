package consullock_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/hashicorp/consul/api"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock/internal/locktest"
)

type link struct {
	*locktest.Wire
	base http.RoundTripper
	url  string
}

// transactions are the requests that a dlocktest.Link disturbs. Session requests and reads come before them, so a transaction
// whose reply is lost has been applied.
var transactions = []string{"lock", "unlock", "check", "seal", "unlock+seal"}

func clientOver(tb testing.TB, l link) *api.Client {
	tb.Helper()
	c, err := api.NewClient(&api.Config{Address: l.url, HttpClient: &http.Client{Transport: locktest.Transport{
		Wire: l.Wire, Base: l.base, Kind: kind,
		Header: http.Header{"X-Consul-Index": {"1"}, "X-Consul-Lastcontact": {"0"}, "X-Consul-Results-Filtered-By-Acls": {"true"}},
	}}})
	require.NoError(tb, err)
	return c
}

// kind is what a request does: create, renew, destroy or watch a session; read or poll an entry; or a transaction.
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
