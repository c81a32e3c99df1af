package testbed

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Names of the environment variables that choose a DynamoDB server.
const (
	EnvDynamoDBImage  = "FENCELAB_DYNAMODB_IMAGE"
	EnvDynamoDBServer = "FENCELAB_DYNAMODB_SERVER" // the path of minidyn
	EnvDynamoDBAddr   = "FENCELAB_DYNAMODB_ADDR"   // host:port, or an http:// or https:// URL, with the credentials or else those of AWS_ACCESS_KEY_ID
)

// DynamoDBImage is the image that containers run unless FENCELAB_DYNAMODB_IMAGE names another.
const DynamoDBImage = "amazon/dynamodb-local:2.5.4"

var dynamoDBKind = kind{
	name: "dynamodb", title: "DynamoDB server", env: "DYNAMODB",
	image: DynamoDBImage, ports: []int{8000}, data: "/data",
	timeout:  time.Minute, // 10 ms are usual; of Amazon's, which is a Java program, 2 s
	want:     "host:port or http:// URL",
	url:      withCredentials,
	programs: []string{"minidyn"}, module: "minidyn",
	ready: func(ctx context.Context, addr string, _ int) (string, error) {
		u, err := url.Parse(withCredentials(addr))
		if err != nil {
			return "", err
		}
		return dynamoDBReady(ctx, u)
	},
	external: func(ctx context.Context, k *kind, set string) ([]*Server, error) {
		return findExternalAWS(ctx, k, set, dynamoDBReady)
	},
}

// StartDynamoDB starts an imitation of DynamoDB, or finds the external server, and returns once it answers: minidyn as a
// local process, Amazon's own DynamoDB Local in a container. Both keep everything in memory: killed and restarted, they have
// nothing left, so that a crash of theirs says nothing about DynamoDB. Server.URL has the credentials, and Version is what the
// server calls itself. The rest is as [StartRedis] says.
func StartDynamoDB(ctx context.Context, o *Options) (*Server, error) {
	c, err := start(ctx, &group{kind: &dynamoDBKind, names: []string{"dynamodb"}, command: dynamoDBCommand}, o)
	if err != nil {
		return nil, err
	}
	return c.Servers[0], nil
}

// dynamoDBCommand leaves a container to its image, which runs the server by itself.
func dynamoDBCommand(_ context.Context, at place) (command, error) {
	if at.Provider == Containers {
		return command{Args: at.More}, nil
	}
	args := []string{"minidyn", "-addr", fmt.Sprintf("%s:%d", at.Listen, at.me().Ports[0])}
	return command{Args: append(args, at.More...)}, nil
}

// dynamoDBReady asks for a table that nobody has.
func dynamoDBReady(ctx context.Context, u *url.URL) (string, error) {
	status, answer, version, err := askAWS(ctx, u, "dynamodb", http.MethodPost, `{"TableName":"fencelab-ready"}`, http.Header{
		"Content-Type": {"application/x-amz-json-1.0"}, "X-Amz-Target": {"DynamoDB_20120810.DescribeTable"},
	})
	if err == nil && !strings.Contains(answer, "ResourceNotFoundException") {
		err = fmt.Errorf("asked for a table that nobody has, it answered %d: %.300s", status, answer)
	}
	return version, err
}
