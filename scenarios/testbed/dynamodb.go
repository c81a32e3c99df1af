package testbed

import (
	"context"
	"fmt"
)

var dynamoDB = serverType{
	name: "dynamodb", title: "DynamoDB server", image: "amazon/dynamodb-local:2.5.4", ports: []int{8000}, data: "/data",
	program: "minidyn", module: "minidyn",
	url: awsURL, schemes: awsSchemes, accept: acceptAWS,
	command: func(_ context.Context, at placement) (command, error) {
		if at.Provider == Containers { // the image runs the server by itself
			return command{Args: at.More}, nil
		}
		args := []string{"minidyn", "-addr", fmt.Sprintf("%s:%d", at.Listen, at.me().Ports[0])}
		return command{Args: append(args, at.More...)}, nil
	},
	ready: readyAWS,
}

// StartDynamoDB starts an imitation of DynamoDB: minidyn as a local process, Amazon's DynamoDB Local in a container. Both keep
// everything in memory. Version is the server's name.
func StartDynamoDB(ctx context.Context, o *Options) (*Server, error) {
	return startSingle(ctx, &dynamoDB, o)
}
