package consullock_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/hashicorp/consul/api"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/consullock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
)

func TestScripts(t *testing.T) {
	locktest.Scripts(t, "testdata/scripts.txt", true, func(t *testing.T) locktest.Bench {
		s := newConsul()
		b := bench(t, func() link { return link{locktest.NewWire(), s, "consul"} }, func(key string) string { return key })
		b.Steps["sessions"] = func(...string) string { return fmt.Sprintf("%d, %d watched", len(s.sessions), s.watches) }
		b.Steps["restore"] = func(...string) string { s.restore(); return "" }
		return b
	})
}

// Consul's results are those in virtual time.
func TestScriptsOnConsul(t *testing.T) {
	locktest.Scripts(t, "testdata/scripts.txt", false, func(t *testing.T) locktest.Bench {
		unique := uuid.NewString()
		return bench(t, func() link { return toServer(t) }, func(key string) string { return key + "-" + unique })
	})
}

// bench adds steps: show K, put K VALUE, delete K (entries); session S, seal S, sealed S, destroy S, where S is s1 for the first
// one shown; and in virtual time sessions, and restore, to an empty snapshot's index.
func bench(t *testing.T, to func() link, key func(string) string) locktest.Bench {
	c := clientOver(t, to())
	var ids []string
	id := func(s string) string { return ids[s[1]-'1'] }
	get := func(name string) *api.KVPair {
		e, _, err := c.KV().Get("lock/"+name, &api.QueryOptions{RequireConsistent: true})
		require.NoError(t, err)
		return e
	}
	write := func(op api.KVOp, name, value string) string {
		ok, _, _, err := c.Txn().Txn(api.TxnOps{{KV: &api.KVTxnOp{Verb: op, Key: "lock/" + name, Value: []byte(value)}}},
			&api.QueryOptions{RequireConsistent: true})
		require.NoError(t, err)
		require.True(t, ok)
		return ""
	}
	return locktest.Bench{
		Key: key,
		Open: func(w *locktest.Wire, options ...string) dlock.Backend {
			var o consullock.Options
			for _, option := range options {
				name, value, _ := strings.Cut(option, "=")
				d, err := time.ParseDuration(value)
				require.NoError(t, err)
				*map[string]*time.Duration{"LockDelay": &o.LockDelay, "MinSessionTTL": &o.MinSessionTTL}[name] = d
			}
			l := to()
			return over(t, link{w, l.base, l.url}, &o)
		},
		Steps: map[string]func(...string) string{
			"show": func(args ...string) string {
				e := get(key(args[0]))
				switch {
				case e == nil:
					return "none"
				case e.Session == "":
					return string(e.Value)
				case !slices.Contains(ids, e.Session):
					ids = append(ids, e.Session)
				}
				return fmt.Sprintf("%s by s%d", e.Value, slices.Index(ids, e.Session)+1)
			},
			"put":    func(args ...string) string { return write(api.KVSet, key(args[0]), args[1]) },
			"delete": func(args ...string) string { return write(api.KVDelete, key(args[0]), "") },
			"seal":   func(args ...string) string { return write(api.KVSet, "=session/"+id(args[0]), "") },
			"sealed": func(args ...string) string { return fmt.Sprint(get("=session/"+id(args[0])) != nil) },
			"destroy": func(args ...string) string {
				_, err := c.Session().Destroy(id(args[0]), nil)
				require.NoError(t, err)
				return ""
			},
			"session": func(args ...string) string {
				s, _, err := c.Session().Info(id(args[0]), nil)
				require.NoError(t, err)
				if s == nil {
					return "none"
				}
				return fmt.Sprintf("TTL %s, lock-delay %v, %s, node checks %v", s.TTL, s.LockDelay, s.Behavior, s.NodeChecks)
			},
		},
	}
}
