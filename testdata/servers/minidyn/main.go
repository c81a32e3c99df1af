// Command minidyn serves an imitation of DynamoDB, github.com/truora/minidyn, over HTTP, for tests that need a process which
// can be frozen and killed. It keeps everything in memory: what it held is gone when it ends.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/truora/minidyn/server"
)

func main() {
	addr := flag.String("addr", "127.0.0.1:8000", "`host:port` to listen on")
	flag.Parse()
	if err := run(*addr); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(addr string) error {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", addr)
	if err != nil {
		return fmt.Errorf("minidyn: %w", err)
	}
	s := http.Server{Handler: handler(version()), ReadHeaderTimeout: time.Minute}
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("minidyn: %w", err)
	}
	return nil
}

// handler is minidyn with two things made good. It can't keep empty bytes, as DynamoDB does: they become other bytes. And it
// writes the items of its answers while other requests change them: they come one by one.
func handler(name string) http.Handler {
	const empty, instead = `{"B":""}`, `{"B":"ZW1wdHkgdmFsdWU="}`
	fake := server.NewServer()
	var mu sync.Mutex
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(bytes.ReplaceAll(body, []byte(empty), []byte(instead))))
		answer := httptest.NewRecorder()
		mu.Lock()
		fake.ServeHTTP(answer, r)
		mu.Unlock()
		maps.Copy(w.Header(), answer.Header())
		w.Header().Set("Server", name)
		w.WriteHeader(answer.Code)
		_, _ = w.Write(bytes.ReplaceAll(answer.Body.Bytes(), []byte(instead), []byte(empty)))
	})
}

// version is what the imitation calls itself.
func version() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			if m.Path == "github.com/truora/minidyn" {
				return "minidyn/" + strings.TrimPrefix(m.Version, "v")
			}
		}
	}
	return "minidyn"
}
