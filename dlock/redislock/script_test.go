package redislock_test

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/redislock"
)

// A client is opened with spin, max=N, handoff=TIME, or cluster: then its server knows no subscriptions. What its subscription
// sends is of kind subscribe, and each byte that it receives of kind message; an answer is sent instead.
//
// The step redis sends a command, with _ for spaces, where wake and wake1 are the channels of the first two waiters; it shows
// channels by number. It doesn't wait for requests under way.
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
						o.Mode, o.Spin.Min = redislock.ModeSpin, math.MaxInt64
					case "max":
						_, err := fmt.Sscan(value, &o.Queue.Max)
						require.NoError(t, err)
					case "handoff":
						var err error
						o.Queue.HandoffTTL, err = time.ParseDuration(value)
						require.NoError(t, err)
					}
				}
				on := s
				on.dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
					conn, err := s.dial(ctx, network, addr)
					c := &subscription{Conn: conn, wire: w}
					c.ctx, c.close = context.WithCancel(context.Background())
					return c, err
				}
				client := on.client(t, on.link())
				client.AddHook(locktest.RedisHook{Wire: w, Kinds: kinds})
				var universal redis.UniversalClient = client
				if slices.Contains(options, "cluster") {
					universal = traced{client}
				}
				b, err := redislock.New(universal, o)
				require.NoError(t, err)
				return b
			},
			Steps: map[string]func(...string) string{
				"redis": func(args ...string) string {
					command := make([]any, len(args))
					for i, arg := range args {
						words := strings.Split(arg, "_")
						for i, w := range words {
							if n, ok := strings.CutPrefix(w, "wake"); ok && !strings.HasPrefix(n, ":") {
								channel.ReplaceAllStringFunc(c.LIndex(t.Context(), "queue:{k}", 0).Val(), number)
								n, _ := strconv.Atoi(n)
								words[i] = channels[n]
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

// subscription is a connection to Redis that has a Wire's faults once it subscribes.
type subscription struct {
	net.Conn
	wire  *locktest.Wire
	on    atomic.Bool
	ctx   context.Context // until it is closed
	close context.CancelFunc
}

func (c *subscription) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte("subscribe")) {
		c.on.Store(true)
	}
	if !c.on.Load() {
		return c.Conn.Write(b)
	}
	return disturb(c, "subscribe", func(instead string) (int, error) {
		if instead == "" {
			return c.Conn.Write(b)
		}
		words := strings.Fields(instead)
		request := fmt.Appendf(nil, "*%d\r\n", len(words))
		for _, w := range words {
			request = fmt.Appendf(request, "$%d\r\n%s\r\n", len(w), w)
		}
		_, err := c.Conn.Write(request)
		return len(b), err
	})
}

// Read returns one byte at a time, so that a deadline may pass within a message.
func (c *subscription) Read(b []byte) (int, error) {
	if !c.on.Load() {
		return c.Conn.Read(b)
	}
	n, err := c.Conn.Read(b[:1])
	if err != nil {
		return n, err
	}
	return disturb(c, "message", func(string) (int, error) { return n, nil })
}

func disturb(c *subscription, kind string, send func(instead string) (int, error)) (int, error) {
	n, err := locktest.Disturb(c.ctx, c.wire, kind, func(_ context.Context, instead string) (int, error) { return send(instead) })
	if err != nil {
		_ = c.Close()
	}
	return n, err
}

func (c *subscription) Close() error {
	c.close()
	return c.Conn.Close()
}
