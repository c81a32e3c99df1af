package redislock_test

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/redislock"
)

func TestScripts(t *testing.T) {
	scripts(t, true, func(t *testing.T) redisServer { return newMini(t) })
}

func TestScriptsOnRedis(t *testing.T) {
	scripts(t, false, func(t *testing.T) redisServer { return onServer(t, server) })
}

// A client is opened with spin, max=N and handoff=TIME. The step redis sends a command, with spaces for _; wake is the channel of the
// first waiter that there was. It shows channels by number.
func scripts(t *testing.T, virtual bool, start func(t *testing.T) redisServer) {
	t.Helper()
	kinds := locktest.RedisKinds(t, "acquire", "renew", "release", "leave")
	channel, keys := regexp.MustCompile(`(\d+ )?wake:[0-9a-f-]{36}`), regexp.MustCompile(`\{(\w+)\}`)
	locktest.Scripts(t, "testdata/scripts.txt", virtual, func(t *testing.T) locktest.Bench {
		s := start(t)
		s.warm(t)
		_, c, _ := s.backend(t)
		unique := "" // on a shared server a suffix of keys
		if !virtual {
			unique = "-" + uuid.NewString()
		}
		var channels []string
		number := func(found string) string {
			found = found[strings.Index(found, "wake:"):]
			if !slices.Contains(channels, found) {
				channels = append(channels, found)
			}
			return fmt.Sprint("wake", slices.Index(channels, found))
		}
		return locktest.Bench{
			Key:  func(key string) string { return key + unique },
			Text: func(err error) string { return strings.ReplaceAll(err.Error(), unique, "") },
			Open: func(w *locktest.Wire, options ...string) dlock.Backend {
				o := s.options()
				for _, option := range options {
					switch name, value, _ := strings.Cut(option, "="); name {
					case "spin":
						o.Mode, o.Spin.Min = redislock.ModeSpin, time.Hour
					case "max":
						_, err := fmt.Sscan(value, &o.Queue.Max)
						require.NoError(t, err)
					default:
						var err error
						o.Queue.HandoffTTL, err = time.ParseDuration(value)
						require.NoError(t, err)
					}
				}
				client := s.client(t, s.link())
				client.AddHook(locktest.RedisHook{Wire: w, Kinds: kinds})
				b, err := redislock.New(client, o)
				require.NoError(t, err)
				return b
			},
			Steps: map[string]func(...string) string{
				"redis": func(args ...string) string {
					command := make([]any, len(args))
					for i, arg := range args {
						words := strings.Split(keys.ReplaceAllString(arg, "{$1"+unique+"}"), "_")
						for i, w := range words {
							if w == "wake" {
								channel.ReplaceAllStringFunc(c.LIndex(t.Context(), "queue:{k"+unique+"}", 0).Val(), number)
								words[i] = channels[0]
							}
						}
						command[i] = strings.Join(words, " ")
					}
					v, err := c.Do(t.Context(), command...).Result()
					if err != nil {
						return err.Error()
					}
					if _, count := v.(int64); count || v == "OK" {
						return ""
					}
					return strings.ReplaceAll(channel.ReplaceAllStringFunc(fmt.Sprint(v), number), unique, "")
				},
			},
		}
	})
}
