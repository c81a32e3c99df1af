package redlock_test

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/redlock"
)

// A request's kind is its script and its node: acquire/0. A client is opened with nodes=N, 5 unless given, and Options. Steps on
// the nodes, whose numbers are written without a space, all of them as *:
//
//	has K, tokens K              each node's owner of the key, and its counter
//	set K NODES OWNER [TTL]      another Backend's lock
//	delete K NODES
//	count K NODES TOKEN          the counter, written for another owner
//	jump NODES TIME              the clock
//	loose                        owners of given-up attempts with requests in flight, of all clients
//	forget NODES
func TestScripts(t *testing.T) {
	kinds := locktest.RedisKinds(t, "acquire", "mint", "release", "renew", "unsafe")
	locktest.Scripts(t, "testdata/scripts.txt", true, func(t *testing.T) locktest.Bench {
		all := minis(t, 5)
		all.warm(t)
		var opened []*redlock.Backend
		on := func(f func(n node, key string, args []string)) func(args ...string) string {
			return func(args ...string) string {
				key, which := args[0], args[1]
				for i, n := range all {
					if which == "*" || strings.Contains(which, strconv.Itoa(i)) {
						f(n, key, args[2:])
					}
				}
				return ""
			}
		}
		show := func(f func(n node, key string) string) func(args ...string) string {
			return func(args ...string) string {
				shown := make([]string, len(all))
				for i, n := range all {
					shown[i] = f(n, args[0])
				}
				return strings.Join(shown, " ")
			}
		}
		lock := func(key string) string { return "redlock:{" + key + "}" }
		fence := func(key string) string { return "redlock:fence:{" + key + "}" }
		duration := func(text string) time.Duration {
			d, err := time.ParseDuration(text)
			require.NoError(t, err)
			return d
		}
		return locktest.Bench{
			Key: func(key string) string { return key },
			Text: func(err error) string {
				text, _, _ := strings.Cut(err.Error(), ", first ") // which is one of several
				return text
			},
			Open: func(w *locktest.Wire, options ...string) dlock.Backend {
				o, ns := patient, all
				for _, option := range options {
					switch name, value, _ := strings.Cut(option, "="); name {
					case "nodes":
						n, err := strconv.Atoi(value)
						require.NoError(t, err)
						ns = all[:n]
					case "NodeTimeout":
						o.NodeTimeout = duration(value)
					case "Spin.Min":
						o.Spin.Min = duration(value)
					default:
						o.UnsafeCounters = true
					}
				}
				clients := make([]redis.UniversalClient, len(ns))
				for i, n := range ns {
					c := n.client(t, n.dial)
					c.AddHook(locktest.RedisHook{Wire: w, Kinds: kinds, Suffix: fmt.Sprint("/", i)})
					clients[i] = c
				}
				b, err := redlock.New(clients, &o)
				require.NoError(t, err)
				opened = append(opened, b)
				return b
			},
			Steps: map[string]func(...string) string{
				"has": show(func(n node, key string) string {
					v, _ := n.mini.Get(lock(key))
					owner, _, _ := strings.Cut(v, " ")
					return cmp.Or(owner, "-")
				}),
				"tokens": show(func(n node, key string) string { return cmp.Or(n.mini.HGet(fence(key), "token"), "0") }),
				"set": on(func(n node, key string, args []string) {
					require.NoError(t, n.mini.Set(lock(key), args[0]+" 1"))
					if len(args) > 1 {
						n.mini.SetTTL(lock(key), duration(args[1]))
					}
				}),
				"loose": func(...string) string {
					n := 0
					for _, b := range opened {
						n += b.Loose()
					}
					return strconv.Itoa(n)
				},
				"delete": on(func(n node, key string, _ []string) { n.mini.Del(lock(key)) }),
				"count": on(func(n node, key string, args []string) {
					n.mini.HSet(fence(key), "token", strings.Join(args, ""), "owner", "another")
				}),
				"jump": func(args ...string) string {
					return on(func(n node, _ string, _ []string) { n.mini.FastForward(duration(args[1])) })("", args[0])
				},
				"forget": func(args ...string) string {
					return on(func(n node, _ string, _ []string) { n.mini.FlushAll() })("", args[0])
				},
			},
		}
	})
}
