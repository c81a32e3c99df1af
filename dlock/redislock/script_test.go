package redislock_test

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/redislock"
)

// A client is opened with spin, max=N and handoff=TIME. The step redis sends a command, with spaces for _; wake is the channel of the
// first waiter that there was. It shows channels by number. It doesn't wait for requests on their way: that needs virtual time.
func TestScripts(t *testing.T) {
	kinds := locktest.RedisKinds(t, "acquire", "renew", "release", "leave")
	channel := regexp.MustCompile(`(\d+ )?wake:[0-9a-f-]{36}`)
	locktest.Scripts(t, "testdata/scripts.txt", true, func(t *testing.T) locktest.Bench {
		s := newMini(t)
		s.warm(t)
		_, c, _ := s.backend(t)
		var channels []string
		number := func(found string) string {
			found = found[strings.Index(found, "wake:"):]
			if !slices.Contains(channels, found) {
				channels = append(channels, found)
			}
			return fmt.Sprint("wake", slices.Index(channels, found))
		}
		return locktest.Bench{
			Key: func(key string) string { return key },
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
						words := strings.Split(arg, "_")
						for i, w := range words {
							if w == "wake" {
								channel.ReplaceAllStringFunc(c.LIndex(t.Context(), "queue:{k}", 0).Val(), number)
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
					return channel.ReplaceAllStringFunc(fmt.Sprint(v), number)
				},
			},
		}
	})
}
